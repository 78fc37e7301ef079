// Device code of the CuPy backend. One launch per verb, whatever the number of layers, rows or slots.
//
// Compiled with NVRTC for compute capability 7.0 and up: no headers, 64-bit integers and pointers as arguments, nothing
// else. Every kernel accepts a count of 0 and then touches nothing. Index arrays are int32 on the device and were
// checked by the host.
//
// Copies are byte exact. The widest access that source and destination allow together is taken, 16 bytes at best; the
// few bytes in front of and behind the aligned part are copied one by one. Nothing outside the span is read or written.

typedef long long i64;
typedef unsigned long long u64;

#define THREADS 256
#define COMPACT_THREADS 1024
#define COMPACT_ITEMS 4

struct __align__(16) Word16 {
    u64 low, high;
};

// Four independent accesses a thread are in flight at a time.
template <typename Word>
static __device__ __forceinline__ void copy_words(char* dest, const char* source, i64 begin, i64 end) {
    Word* to = reinterpret_cast<Word*>(dest);
    const Word* from = reinterpret_cast<const Word*>(source);
    i64 i = begin + threadIdx.x;
    for (; i + 3 * THREADS < end; i += 4 * THREADS) {
        const Word a = from[i], b = from[i + THREADS], c = from[i + 2 * THREADS], d = from[i + 3 * THREADS];
        to[i] = a;
        to[i + THREADS] = b;
        to[i + 2 * THREADS] = c;
        to[i + 3 * THREADS] = d;
    }
    for (; i < end; i += THREADS) to[i] = from[i];
}

// Part number `part` of a copy of `size` bytes, in parts of `chunk` bytes (a multiple of 16).
static __device__ __forceinline__ void copy_part(char* dest, const char* source, i64 size, i64 part, i64 chunk) {
    const u64 apart = (reinterpret_cast<u64>(dest) - reinterpret_cast<u64>(source)) & 15;
    const i64 width = apart ? static_cast<i64>(apart & (~apart + 1)) : 16;
    i64 head = static_cast<i64>((~reinterpret_cast<u64>(dest) + 1) & static_cast<u64>(width - 1));
    if (head > size) head = size;
    const i64 words = (size - head) / width;
    const i64 tail = size - head - words * width;
    const i64 begin = part * (chunk / width);
    i64 end = begin + chunk / width;
    if (end > words) end = words;
    if (begin < end) {
        char* to = dest + head;
        const char* from = source + head;
        switch (width) {
            case 16: copy_words<Word16>(to, from, begin, end); break;
            case 8: copy_words<u64>(to, from, begin, end); break;
            case 4: copy_words<unsigned int>(to, from, begin, end); break;
            case 2: copy_words<unsigned short>(to, from, begin, end); break;
            default: copy_words<unsigned char>(to, from, begin, end);
        }
    }
    if (part == 0) {
        const i64 t = threadIdx.x;
        if (t < head) dest[t] = source[t];
        if (t < tail) dest[size - tail + t] = source[size - tail + t];
    }
}

static __device__ __forceinline__ void zero_part(char* dest, i64 size, i64 part, i64 chunk) {
    i64 head = static_cast<i64>((~reinterpret_cast<u64>(dest) + 1) & 15);
    if (head > size) head = size;
    const i64 words = (size - head) / 16;
    const i64 tail = size - head - words * 16;
    const i64 begin = part * (chunk / 16);
    i64 end = begin + chunk / 16;
    if (end > words) end = words;
    Word16 zero;
    zero.low = zero.high = 0;
    Word16* to = reinterpret_cast<Word16*>(dest + head);
    for (i64 i = begin + threadIdx.x; i < end; i += THREADS) to[i] = zero;
    if (part == 0) {
        const i64 t = threadIdx.x;
        if (t < head) dest[t] = 0;
        if (t < tail) dest[size - tail + t] = 0;
    }
}

extern "C" {

// table[slot, 0] = ids, table[slot, 1] = ids + num_pages (-1 stays -1). table int[slots, 2, width], ids int[rows, width].
__global__ void __launch_bounds__(THREADS)
upload_rows(int* table, const int* ids, const int* slots, i64 rows, i64 width, i64 num_pages) {
    const i64 step = static_cast<i64>(gridDim.x) * THREADS;
    for (i64 i = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x; i < rows * width; i += step) {
        const i64 row = i / width;
        const int id = ids[i];
        int* to = table + static_cast<i64>(slots[row]) * 2 * width + (i - row * width);
        to[0] = id;
        to[width] = id >= 0 ? id + static_cast<int>(num_pages) : -1;
    }
}

// For old index ascending: lengths[mapping[i]] = lengths[i] where 0 <= mapping[i]; destinations never exceed sources.
// One block walks upward. All of a stretch is read before any of it is written, and what a stretch writes lies at or
// below its own indices, so the next stretch may be read while this one is still being written: one barrier a stretch.
__global__ void __launch_bounds__(COMPACT_THREADS) compact_lengths(int* lengths, const int* mapping, i64 count) {
    const i64 stretch = static_cast<i64>(blockDim.x) * COMPACT_ITEMS;
    for (i64 base = 0; base < count; base += stretch) {
        int value[COMPACT_ITEMS];
        i64 target[COMPACT_ITEMS];
#pragma unroll
        for (int k = 0; k < COMPACT_ITEMS; ++k) {
            const i64 i = base + static_cast<i64>(k) * blockDim.x + threadIdx.x;
            target[k] = -1;
            if (i < count) {
                const i64 to = mapping[i];
                if (to >= 0 && to < i) {
                    target[k] = to;
                    value[k] = lengths[i];
                }
            }
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < COMPACT_ITEMS; ++k) {
            if (target[k] >= 0) lengths[target[k]] = value[k];
        }
    }
}

// increments: one each, or null and the same `scalar` for all.
__global__ void __launch_bounds__(THREADS) add_lengths(int* lengths, const int* increments, i64 scalar, i64 count) {
    const i64 step = static_cast<i64>(gridDim.x) * THREADS;
    for (i64 i = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x; i < count; i += step) {
        lengths[i] += increments ? increments[i] : static_cast<int>(scalar);
    }
}

// dest[i] = table[slots[i]], rows of `width` ints.
__global__ void __launch_bounds__(THREADS)
gather_rows(int* dest, const int* table, const int* slots, i64 count, i64 width) {
    const i64 step = static_cast<i64>(gridDim.x) * THREADS;
    for (i64 i = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x; i < count * width; i += step) {
        const i64 row = i / width;
        dest[i] = table[static_cast<i64>(slots[row]) * width + (i - row * width)];
    }
}

// plan: [address x tensors][bytes of a row x tensors]. rows: null means the one row `single`.
// Grid of the next three: x parts, y rows or copies, z tensors (or layers and halves); y and z stride.
__global__ void __launch_bounds__(THREADS)
zero_rows(const u64* plan, i64 tensors, const int* rows, i64 single, i64 count, i64 chunk) {
    for (i64 tensor = blockIdx.z; tensor < tensors; tensor += gridDim.z) {
        char* base = reinterpret_cast<char*>(plan[tensor]);
        const i64 size = static_cast<i64>(plan[tensors + tensor]);
        for (i64 i = blockIdx.y; i < count; i += gridDim.y) {
            const i64 row = rows ? rows[i] : single;
            zero_part(base + row * size, size, blockIdx.x, chunk);
        }
    }
}

// plan: [destination x pairs][source x pairs][bytes of a row x pairs].
__global__ void __launch_bounds__(THREADS)
copy_rows(const u64* plan, i64 pairs, const int* dest_rows, const int* source_rows, i64 count, i64 chunk) {
    for (i64 pair = blockIdx.z; pair < pairs; pair += gridDim.z) {
        char* dest = reinterpret_cast<char*>(plan[pair]);
        const char* source = reinterpret_cast<const char*>(plan[pairs + pair]);
        const i64 size = static_cast<i64>(plan[2 * pairs + pair]);
        for (i64 i = blockIdx.y; i < count; i += gridDim.y) {
            copy_part(dest + dest_rows[i] * size, source + source_rows[i] * size, size, blockIdx.x, chunk);
        }
    }
}

// plan: [slab x layers][pool x layers][bytes of a token x layers][bytes of a page x layers][bytes of half a pool x layers].
// slab [slots, 2, page], pool [2, pages, page]. to_slab: 1 captures, 0 restores. Only the first tokens[i] tokens move.
__global__ void __launch_bounds__(THREADS)
copy_pages(const u64* plan, i64 layers, const int* slots, const int* pages, const int* tokens, i64 count, i64 to_slab,
           i64 chunk) {
    for (i64 z = blockIdx.z; z < 2 * layers; z += gridDim.z) {
        const i64 layer = z >> 1, half = z & 1;
        char* slab = reinterpret_cast<char*>(plan[layer]);
        char* pool = reinterpret_cast<char*>(plan[layers + layer]);
        const i64 token = static_cast<i64>(plan[2 * layers + layer]);
        const i64 page = static_cast<i64>(plan[3 * layers + layer]);
        pool += half * static_cast<i64>(plan[4 * layers + layer]);
        for (i64 i = blockIdx.y; i < count; i += gridDim.y) {
            char* in_slab = slab + (static_cast<i64>(slots[i]) * 2 + half) * page;
            char* in_pool = pool + static_cast<i64>(pages[i]) * page;
            const i64 size = tokens[i] * token;
            // Most pages are not full, so a block takes several parts: blocks that find nothing to do cost too much.
            for (i64 part = blockIdx.x; part == 0 || part * chunk < size; part += gridDim.x) {
                copy_part(to_slab ? in_slab : in_pool, to_slab ? in_pool : in_slab, size, part, chunk);
            }
        }
    }
}

}  // extern "C"
