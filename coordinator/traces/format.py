"""What a line of a trace is: one record of one kind, checked field by field when it is read.

A trace is JSON Lines. The first line is the header; then each public call that was made, and under it the steps that it
caused, in order. Nothing in it differs between two runs of one script: no clock, no address, no keyed hash. The prose,
and what each field means, is in ``docs/trace-format.md``; the JSON Schema beside it is made from the records below.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct

__all__ = [
    "FORMAT",
    "LINE_BYTES_MAX",
    "STEPS_OF_A_CALL_MAX",
    "VERSION",
    "Act",
    "AdmitSequence",
    "BeginBatchCompaction",
    "BeginRequest",
    "CallRecord",
    "Close",
    "CompactBatch",
    "CompleteDecodeStep",
    "Config",
    "Deployment",
    "EnqueuePrefillCaptures",
    "Extras",
    "FinalizePrefill",
    "FinalizeSequence",
    "Finish",
    "Header",
    "Identity",
    "Layer",
    "PrepareDecodeStep",
    "PreparePrefill",
    "PublishMtpEndpoint",
    "Record",
    "RestoreMtpBoundary",
    "RetractSequence",
    "Sequence",
    "Shutdown",
    "Span",
    "Speculative",
    "StepRecord",
    "Tensor",
    "Unusable",
    "json_schema",
]

FORMAT: Final = "context-cache-trace"
VERSION: Final = 1
LINE_BYTES_MAX: Final = 16 * 2**20
"""No line that a recorder writes comes near this; a longer one is refused before it is read."""
STEPS_OF_A_CALL_MAX: Final = 100_000
"""A call causes a handful of steps, a shutdown a handful for each request that it releases."""

Int32: TypeAlias = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Size: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Int64: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Large: TypeAlias = Annotated[int, Meta(ge=-(2**62), le=2**62)]
Name: TypeAlias = Annotated[str, Meta(max_length=200)]
Hex: TypeAlias = Annotated[str, Meta(pattern="^([0-9a-f][0-9a-f])*$", max_length=2048)]
Tokens: TypeAlias = tuple[Annotated[int, Meta(ge=-1, le=2**53)], Count]
"""(offset, count) in the token file, in tokens; the offset is -1 in a redacted trace."""
Headroom: TypeAlias = tuple[Large, Large]
Lengths: TypeAlias = list[Int32]
Resources: TypeAlias = tuple[Count, Count, Count, Count]
"""Base pages, draft pages, recurrent snapshot slots, partial-KV snapshot slots."""


class _Part(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class Layer(_Part, kw_only=True, frozen=True):
    """A layer of the model; see ``LayerGeometry``."""

    kind: Name
    kv_heads: Count = 0
    head_dim: Count = 0
    kv_donor: Count | None = None
    heads: Count = 0
    state: Count = 0
    conv_dim: Count = 0
    conv_kernel: Count = 0
    state_dtype: Name = "float32"
    conv_dtype: Name = "float16"


class Speculative(_Part, kw_only=True, frozen=True):
    """The draft of a speculative deployment; see ``SpecConfig``."""

    mode: Name
    draft_layers: list[Layer] = []
    verify_size: Count = 1
    steps: Count = 1
    top_k: Count = 1
    hidden_dim: Count = 0


class Deployment(_Part, kw_only=True, frozen=True):
    """Geometry; see ``DeploymentConfig``."""

    max_batch: Size
    kv_capacity_tokens: Size
    page_size: Size
    layers: list[Layer]
    kv_dtype: Name = "float16"
    spec_config: Speculative | None = None
    enforce_min_pool: bool = True
    block_diffusion: bool = False


class Config(_Part, kw_only=True, frozen=True):
    """What of the configuration decides what happens; ``touch_on_hit`` is the manager's."""

    max_records: Count
    touch_on_hit: bool = False


class Header(_Part, tag_field="line", tag="header", kw_only=True, frozen=True):
    """The first line.

    flavour:    the model's state and draft, in words.
    capacities: base pages, draft pages, recurrent and partial-KV snapshot slots.
    machines:   fingerprint of each machine's table.
    tokens:     whether token ids lie in the token file; False: redacted.
    seed:       of the script that was recorded, if it has one; for the reader alone.
    clear_rows: the page tables had been used before and every row was clear; False: they were new.
    """

    format: Name
    version: int
    flavour: Name
    deployment: Deployment
    config: Config
    capacities: Resources
    machines: dict[Name, Name]
    tokens: bool = True
    seed: int | None = None
    clear_rows: bool = False


class Act(_Part, kw_only=True, frozen=True):
    """One thing asked of the device, or one publication that failed.

    verb:   the verb of the device, ``drain``, or ``publish``.
    digest: eight hexadecimal digits over its arguments.
    slot:   of a failed publication: the resident slot.
    failed: class of the error; of a drain: ``not_idle`` or the class of an interrupt.
    nth:    of a failure: which use of this verb in its call it was, counted from 1; None: it had been done when an
            interrupt came, so that failing instead of it would not be the same.
    """

    verb: Name
    digest: Name | None = None
    slot: Count | None = None
    failed: Name | None = None
    nth: Count | None = None


class StepRecord(_Part, tag_field="line", tag="step", kw_only=True, frozen=True):
    """One row that fired, was refused or failed; see ``machines.Step``. ``slots``: as ranges, ``0-3,5``."""

    machine: Name
    subject: Name
    row: Int32
    event: Name
    source: Name
    target: Name
    guards: dict[Name, bool] = {}
    ran: list[Name] = []
    acts: list[Act] = []
    slots: Annotated[str, Meta(pattern="^([0-9,-]*)$", max_length=2**20)] = ""
    outcome: Name
    failed: Name | None = None
    ended: Name | None = None


class Identity(_Part, kw_only=True, frozen=True):
    """One answer to "which prefix is this?", blocks and ends named by the ordinal of their first appearance.

    prompt: the full blocks of a sequence that is admitted. more: blocks completed since. exact: (length, ordinal) of a
    prefix that ends anywhere.
    """

    prompt: list[Count] | None = None
    more: list[Count] | None = None
    exact: tuple[Count, Count] | None = None


class Span(_Part, kw_only=True, frozen=True):
    """See ``MediaSpanKey``."""

    content: Hex
    placement: Hex
    offset: Int64
    order: Int64
    modality: Count


class Extras(_Part, kw_only=True, frozen=True):
    """See ``BlockKeyExtras``. adapter: (id, generation), the generation as decimal text because it may need 64 bits."""

    media: list[Span] = []
    adapter: tuple[Hex, Annotated[str, Meta(pattern="^[0-9]{1,20}$")]] | None = None
    position: Hex | None = None
    embedding: Hex | None = None
    isolation: Hex | None = None


class Sequence(_Part, kw_only=True, frozen=True):
    """A sequence to admit. resident: (slot, epoch). media: (digest or null, how many positions) in order."""

    tokens: Tokens
    resident: tuple[Int32, Int64]
    lookup: Name | None = None
    media: list[tuple[Hex | None, Count]] = []
    extras: Extras | None = None


class Tensor(_Part, kw_only=True, frozen=True):
    """A device tensor of the runtime: its shape, not what it holds. plain: contiguous and writable."""

    shape: Annotated[list[Count], Meta(max_length=8)]
    dtype: Name
    plain: bool = True


class _Call(_Part, tag_field="line", kw_only=True, frozen=True):
    """What every call has: how it ended, and the identities asked for meanwhile."""

    raised: Name | None = None
    identity: list[Identity] = []


class _RequestCall(_Call, kw_only=True, frozen=True):
    """A call on one request; null: a handle that is none of this coordinator's."""

    request: Name | None


class BeginRequest(_Call, tag="begin_request", kw_only=True, frozen=True):
    sequences: list[Sequence]
    headroom: Headroom
    speculative: bool = False
    contract: Name = "COMMITTED_PLUS_LOOKAHEAD"
    lookup: Name = "USE_CACHE"
    commit: Name = "INCLUDING_GENERATED_TOKENS"
    replay_tail: Count = 0
    other_stream: bool = False
    status: Name | None = None
    gave: Name | None = None
    starts: Lengths = []
    insufficient: bool = False


class AdmitSequence(_RequestCall, tag="admit_sequence", kw_only=True, frozen=True):
    sequence: Sequence
    headroom: Headroom
    status: Name | None = None
    start: Int32 = 0
    insufficient: bool = False


class PreparePrefill(_RequestCall, tag="prepare_prefill", kw_only=True, frozen=True):
    status: Name | None = None


class EnqueuePrefillCaptures(_RequestCall, tag="enqueue_prefill_captures", kw_only=True, frozen=True):
    status: Name | None = None


class _Advancing(_RequestCall, kw_only=True, frozen=True):
    """Tokens of the slots, one after another. Without counts: one token each, and one more committed."""

    tokens: Tokens
    counts: Lengths | None = None
    committed: Lengths | None = None
    common: Lengths | None = None
    status: Name | None = None


class FinalizePrefill(_Advancing, tag="finalize_prefill_publication", kw_only=True, frozen=True):
    pass

class FinalizeSequence(_Advancing, tag="finalize_sequence_admission", kw_only=True, frozen=True):
    slot: Large


class CompleteDecodeStep(_Advancing, tag="complete_decode_step", kw_only=True, frozen=True):
    completed: list[Large] = []


class RetractSequence(_RequestCall, tag="retract_sequence_admission", kw_only=True, frozen=True):
    left: bool | None = None


class PrepareDecodeStep(_RequestCall, tag="prepare_decode_step", kw_only=True, frozen=True):
    """``refused``: slots that do not fit; ``too_long``: those beyond a row; ``missing``: of each resource."""

    headroom: Headroom
    status: Name | None = None
    refused: Lengths = []
    too_long: Lengths = []
    missing: Resources | None = None


class BeginBatchCompaction(_RequestCall, tag="begin_batch_compaction", kw_only=True, frozen=True):
    mapping: Lengths
    new_size: Large
    tensor: Tensor
    status: Name | None = None


class CompactBatch(_RequestCall, tag="compact_batch", kw_only=True, frozen=True):
    """``active``: the batch sizes of base and draft cache, which a runtime may have set."""

    active: tuple[Count, Count | None]
    status: Name | None = None


class _HiddenCall(_RequestCall, kw_only=True, frozen=True):
    slot: Large
    hidden: Tensor
    row: Large
    status: Name | None = None


class PublishMtpEndpoint(_HiddenCall, tag="publish_hybrid_mtp_endpoint", kw_only=True, frozen=True):
    length: Large


class RestoreMtpBoundary(_HiddenCall, tag="restore_hybrid_mtp_boundary_hidden", kw_only=True, frozen=True):
    pass

class Finish(_RequestCall, tag="finish", kw_only=True, frozen=True):
    status: Name | None = None


class Close(_RequestCall, tag="close", kw_only=True, frozen=True):
    """A handle was closed, or was lost and its request reaped as an orphan."""


class Shutdown(_Call, tag="shutdown", kw_only=True, frozen=True):
    status: Name | None = None


class Unusable(_RequestCall, tag="unusable", kw_only=True, frozen=True):
    """A call whose arguments no rule could be checked against, so that there is nothing to write down but its name."""

    call: Name


CallRecord: TypeAlias = (
    BeginRequest
    | AdmitSequence
    | PreparePrefill
    | EnqueuePrefillCaptures
    | FinalizePrefill
    | FinalizeSequence
    | CompleteDecodeStep
    | RetractSequence
    | PrepareDecodeStep
    | BeginBatchCompaction
    | CompactBatch
    | PublishMtpEndpoint
    | RestoreMtpBoundary
    | Finish
    | Close
    | Shutdown
    | Unusable
)
Record: TypeAlias = Header | CallRecord | StepRecord


def json_schema() -> dict[str, Any]:
    """The JSON Schema of one line."""
    schema = msgspec.json.schema(Record)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"One line of a {FORMAT}, version {VERSION}",
        **schema,
    }
