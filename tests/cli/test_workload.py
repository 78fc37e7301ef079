"""Reading a workload: what a good file means, and that no bad file ends in anything but a sentence with its line."""

from __future__ import annotations

import io
import json
import os
import sys
import tracemalloc

import numpy as np
import pytest

from context_cache.coordinator.cli import workload as workload_module
from context_cache.coordinator.cli.sizing import SizeError, size_run
from context_cache.coordinator.cli.workload import LINE_BYTES_MAX, WorkloadError, read_workload

OWN = {"token_ids": [1, 2, 3], "max_new_tokens": 4}
MOONCAKE = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [7, 9]}


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "requests.jsonl"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def own(**changes):
    return json.dumps({**OWN, **changes})


def mooncake(**changes):
    return json.dumps({**MOONCAKE, **changes})


# What a good file means


def test_token_ids_are_the_prompt(write):
    (request,) = read_workload(write(own())).requests
    assert request.prompt().tolist() == [1, 2, 3]
    assert request.prompt().dtype == np.int32
    assert (request.line, request.prompt_length, request.max_new_tokens) == (1, 3, 4)


def test_text_is_its_utf8_bytes(write):
    (request,) = read_workload(write(json.dumps({"text": "aé", "max_new_tokens": 1}))).requests
    assert request.prompt().tolist() == list("aé".encode())
    assert request.prompt_length == 3


def test_optional_keys_are_kept(write):
    line = own(lookup_policy="bypass", commit_policy="prefill_state_only", tenant="north", arrival=1.5)
    (request,) = read_workload(write(line)).requests
    assert (request.lookup_policy, request.commit_policy, request.tenant) == ("bypass", "prefill_state_only", "north")


def test_a_hash_id_stands_for_its_512_tokens_cut_to_the_input_length(write):
    (request,) = read_workload(write(mooncake())).requests
    assert request.prompt().tolist() == [*range(7 * 512, 8 * 512), *range(9 * 512, 9 * 512 + 88)]
    assert request.max_new_tokens == 3


def test_the_largest_hash_id_still_fits_int32(write):
    (request,) = read_workload(write(mooncake(input_length=512, hash_ids=[4194303]))).requests
    assert request.prompt()[-1] == 2**31 - 1


def test_blank_lines_are_skipped_and_line_numbers_stay(write):
    requests = read_workload(write(f"\n  \n{own()}\r\n\n{own()}")).requests
    assert [request.line for request in requests] == [3, 5]


def test_a_byte_order_mark_is_no_fault(write):
    assert len(read_workload(write(b"\xef\xbb\xbf" + own().encode())).requests) == 1


def test_standard_input_is_a_dash(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(own().encode())))
    assert read_workload("-").source == "standard input"


def test_a_cut_limits_requests_and_outputs(write):
    workload = read_workload(write(f"{own()}\n{own(max_new_tokens=2)}\n{own()}")).cut(limit=2, max_new_tokens=3)
    assert [request.max_new_tokens for request in workload.requests] == [3, 2]
    assert workload.requests[0].prompt().tolist() == [1, 2, 3]


def test_long_prompts_are_expanded_only_when_taken(write):
    """4,000 requests of 51,200 tokens would be 800 MB as arrays; validated they hold 100 ids each."""
    line = mooncake(input_length=51_200, hash_ids=list(range(100)))
    path = write("\n".join([line] * 4000))
    tracemalloc.start()
    try:
        workload = read_workload(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(workload.requests) == 4000
    assert peak < 16e6


# What a bad file says

BAD_LINES = {
    "not JSON": ("oops", "not JSON"),
    "half an object": ('{"token_ids": [1', "not JSON"),
    "two objects": (own() + own(), "not JSON"),
    "an array": ("[1, 2]", "Expected `object`, got `array`"),
    "a number": ("7", "Expected `object`, got `int`"),
    "null": ("null", "Expected `object`"),
    "an unknown key": (own(max_tokens=3), "unknown field `max_tokens`"),
    "no max_new_tokens": ('{"token_ids": [1]}', "missing required field `max_new_tokens`"),
    "no prompt": ('{"max_new_tokens": 1}', "no prompt; add token_ids or text"),
    "two prompts": (own(text="x"), "both token_ids and text"),
    "empty token_ids": (own(token_ids=[]), "length >= 1"),
    "empty text": ('{"text": "", "max_new_tokens": 1}', "length >= 1"),
    "a lone surrogate": ('{"text": "\\ud800", "max_new_tokens": 1}', "not JSON"),
    "null token_ids": (own(token_ids=None), "Expected `array`, got `null`"),
    "a negative token": (own(token_ids=[1, -2]), "`$.token_ids[1]`"),
    "a token beyond int32": (own(token_ids=[2**31]), "<= 2147483647"),
    "an absurd token": (own(token_ids=[10**30]), "<= 2147483647"),
    "a fractional token": (own(token_ids=[1.5]), "got `float`"),
    "a true token": (own(token_ids=[True]), "got `bool`"),
    "a quoted token": (own(token_ids=["1"]), "got `str`"),
    "nested tokens": (own(token_ids=[[1]]), "got `array`"),
    "max_new_tokens 0": (own(max_new_tokens=0), ">= 1 - at `$.max_new_tokens`"),
    "negative max_new_tokens": (own(max_new_tokens=-5), ">= 1"),
    "absurd max_new_tokens": (own(max_new_tokens=10**18), "<= 2147483647"),
    "infinite max_new_tokens": ('{"token_ids": [1], "max_new_tokens": 1e999}', "max_new_tokens"),
    "NaN": ('{"token_ids": [1], "max_new_tokens": NaN}', "not JSON"),
    "a wrong policy": (own(lookup_policy="maybe"), "`$.lookup_policy`"),
    "a wrong commit policy": (own(commit_policy=3), "`$.commit_policy`"),
    "a number as tenant": (own(tenant=3), "`$.tenant`"),
    "an empty tenant": (own(tenant=""), "`$.tenant`"),
    "a negative arrival": (own(arrival=-1), "`$.arrival`"),
    "deep nesting": ('{"token_ids": ' + "[" * 200_000, "got `array`"),
    "deep nesting in an unknown key": ('{"x": ' + "[" * 200_000, "unknown field `x`"),
    "deep nesting beside a Mooncake key": ('{"hash_ids": ' + "[" * 200_000, "hash_ids"),
    "too few hash ids": (mooncake(hash_ids=[1]), "takes 2 hash_ids of 512 tokens and there are 1"),
    "too many hash ids": (mooncake(hash_ids=[1, 2, 3]), "takes 2 hash_ids of 512 tokens and there are 3"),
    "no hash ids": (mooncake(hash_ids=[]), "length >= 1"),
    "a hash id whose tokens exceed int32": (mooncake(hash_ids=[1, 4194304]), "<= 4194303"),
    "a negative hash id": (mooncake(hash_ids=[1, -1]), ">= 0"),
    "a negative input length": (mooncake(input_length=-600), ">= 1"),
    "an input length of 0": (mooncake(input_length=0), ">= 1"),
    "an output length of 0": (mooncake(output_length=0), ">= 1"),
    "a negative timestamp": (mooncake(timestamp=-1), "`$.timestamp`"),
    "a Mooncake line with an unknown key": (mooncake(model="m"), "unknown field `model`"),
    "a Mooncake line with a key of the own format": (mooncake(tenant="t"), "unknown field `tenant`"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_with_its_number_and_a_way_out(write, name):
    line, problem = BAD_LINES[name]
    good = mooncake() if "input_length" in line or "hash_ids" in line else own()
    path = write(f"{good}\n\n{line}\n{good}\n")
    with pytest.raises(WorkloadError) as caught:
        read_workload(path)
    message = str(caught.value)
    assert message.startswith(f"{path}, line 3: ")
    assert problem in message
    assert "\n" not in message
    assert len(message) < 500
    assert (caught.value.line, caught.value.source) == (3, str(path))


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_first_line_is_refused_as_well(write, name):
    """The first line decides the format, so it takes another way through the reader."""
    with pytest.raises(WorkloadError, match="line 1: "):
        read_workload(write(BAD_LINES[name][0]))


@pytest.mark.parametrize(("first", "second"), [(own(), mooncake()), (mooncake(), own())])
def test_mixed_formats_are_refused(write, first, second):
    with pytest.raises(WorkloadError, match=r"line 2: is in the .* format and the lines before it are in the .* one"):
        read_workload(write(f"{first}\n{second}"))


def test_invalid_utf8_is_refused_with_the_position(write):
    with pytest.raises(WorkloadError, match="line 2: byte 11 is not valid UTF-8"):
        read_workload(write(own().encode() + b'\n{"text": "\xff\xfe", "max_new_tokens": 1}'))


def test_ten_megabytes_on_one_line_are_refused_without_being_read(write):
    path = write(own() + "\n" + '{"token_ids": [' + "1," * (5 * 1024 * 1024))
    tracemalloc.start()
    try:
        with pytest.raises(WorkloadError, match=r"line 2: longer than 8 MiB; write one request a line"):
            read_workload(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * LINE_BYTES_MAX


def test_a_line_of_the_largest_size_is_read(write, monkeypatch):
    """The limit counts the line's own bytes, with or without a line break behind them."""
    monkeypatch.setattr(workload_module, "LINE_BYTES_MAX", len(own()))
    assert len(read_workload(write(f"{own()}\n{own()}")).requests) == 2
    with pytest.raises(WorkloadError, match="line 1: longer than"):
        read_workload(write(own(token_ids=[1, 2, 30])))


@pytest.mark.parametrize("content", [b"", b"\n\n  \n", b"\xef\xbb\xbf"])
def test_a_file_without_requests_is_refused(write, content):
    with pytest.raises(WorkloadError, match="holds no request; write one JSON object a line"):
        read_workload(write(content))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(WorkloadError, match="there is no such file; check the path"):
        read_workload(tmp_path / "missing.jsonl")


def test_a_directory_is_refused(tmp_path):
    with pytest.raises(WorkloadError, match="this is a directory; name a JSON Lines file in it"):
        read_workload(tmp_path)


def test_a_null_byte_in_the_name_is_refused():
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_workload("a\0b")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_file_is_refused(write):
    path = write(own())
    path.chmod(0)
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_workload(path)


# What does not fit


def size(workload, **options):
    return size_run(workload, **{"page_size": 128, "max_batch": 2, **options})


def test_a_row_is_the_longest_request_rounded_up_to_a_page(write):
    workload = read_workload(write(f"{own()}\n{own(token_ids=[5] * 250, max_new_tokens=5)}"))
    assert size(workload).row_tokens == 256
    assert size(workload.cut(limit=1)).row_tokens == 128
    assert size(read_workload(write(own(token_ids=[5] * 250, max_new_tokens=6)))).row_tokens == 384


def test_the_default_pool_is_four_rows_a_sequence(write):
    workload = read_workload(write(own(token_ids=[5] * 250)))
    assert size(workload).pages == 4 * 2 * 2


def test_a_request_longer_than_a_given_row_is_refused_by_line(write):
    workload = read_workload(write(f"{own()}\n{own(token_ids=[5] * 250, max_new_tokens=6)}"))
    with pytest.raises(WorkloadError, match=r"line 2: needs 257 tokens .* a page-table row holds 256; use --max-new"):
        size(workload, row_tokens=200)
    assert size(workload, row_tokens=257).row_tokens == 384
    assert size(workload.cut(max_new_tokens=5), row_tokens=200).row_tokens == 256


def test_an_absurd_length_is_refused_by_line(write):
    workload = read_workload(write(own(max_new_tokens=2**31 - 1)))
    with pytest.raises(WorkloadError, match=r"line 1: needs 2147483651 tokens"):
        size(workload)
    assert size(workload.cut(max_new_tokens=1)).row_tokens == 128


def test_a_pool_smaller_than_one_row_is_refused(write):
    workload = read_workload(write(own(token_ids=[5] * 300)))
    with pytest.raises(SizeError, match=r"--pages 2 is too small: a row of 384 tokens takes 3 pages of 128"):
        size(workload, pages=2)
    assert size(workload, pages=3).pages == 3


def test_a_default_pool_beyond_reason_is_refused(write):
    workload = read_workload(write(own(token_ids=[5] * 3000)))
    with pytest.raises(SizeError, match="choose --pages"):
        size(workload, page_size=1, max_batch=65_536)
