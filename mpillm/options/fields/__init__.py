"""The registry of all options: for command lines, --help, docs/reference/options.md and config.json.

A new option is one declaration in the class of its subject: ``name = option("what it means", parser,
default=…)``. It is then an option of the commands that show its group, an attribute of
`RunConfig` with the type that its parser returns, and a name of `mpillm.fields`.
"""

from __future__ import annotations

from collections.abc import Iterable

from mpillm.options.field import Field
from mpillm.options.fields.data import DataFields, GenerationFields
from mpillm.options.fields.deadlines import DEADLINES as DEADLINES
from mpillm.options.fields.deadlines import DeadlineFields
from mpillm.options.fields.general import GeneralFields
from mpillm.options.fields.loadgen import ConversationFields, LoadgenFields, OtherHarnessFields
from mpillm.options.fields.model import ModelFields
from mpillm.options.fields.results import OutputFields
from mpillm.options.fields.runtime_flags import BUILD_OPTIONS, RUNTIME_FLAGS, RUNTIME_OPTIONS
from mpillm.options.fields.servers import OwnServerFields, ServerFields, TritonFields
from mpillm.options.fields.serving import ServingFields
from mpillm.options.fields.stages import BuildFields, CheckpointFields, HarnessFields
from mpillm.options.fields.topology import TopologyFields


class AllFields(
    GeneralFields,
    TopologyFields,
    ModelFields,
    CheckpointFields,
    BuildFields,
    HarnessFields,
    TritonFields,
    ServerFields,
    OwnServerFields,
    OtherHarnessFields,
    ConversationFields,
    ServingFields,
    DataFields,
    GenerationFields,
    LoadgenFields,
    OutputFields,
    DeadlineFields,
):
    """Every option, by subject."""


FIELDS: tuple[Field, ...] = tuple(AllFields.declared())
BY_NAME: dict[str, Field] = {name: field for field in FIELDS for name in (field.name, *field.aliases)}

# Fields that several commands show although they do not show the fields' groups.
SIZES = ("tensor_parallelism", "pipeline_parallelism", "moe_expert_parallelism")
MODEL_AND_LIMITS = ("model_path", "max_batch_size", "max_num_tokens", "max_seq_len")

# Options that may set others: flags with keys that are options, and options whose value implies another's.
SETS: dict[Field, tuple[Field, ...]] = {
    BuildFields.gpu_batch_size: (ModelFields.max_batch_size,),
    HarnessFields.trtllm_runtime_flags: tuple(
        field for field in (*RUNTIME_FLAGS.values(), *RUNTIME_OPTIONS.values()) if field in FIELDS
    ),
    BuildFields.trtllm_build_flags: tuple(BUILD_OPTIONS.values()),
    GeneralFields.use_triton: (GeneralFields.harness_type,),
    GeneralFields.harness_type: (TopologyFields.core_type,),
    OwnServerFields.server: (TopologyFields.core_type,),
    HarnessFields.trtllm_server_urls: (TopologyFields.core_type,),
    TopologyFields.core_type: (TopologyFields.mode,),
}


def command_fields(*groups: str, also: Iterable[str] = ()) -> list[Field]:
    """Return a command's options: the fields of `groups` and `also`, and all fields that may set these."""
    selected = {field for field in FIELDS if field.group in groups} | {BY_NAME[name] for name in also}
    while setting := {field for field, others in SETS.items() if selected.intersection(others)} - selected:
        selected |= setting
    return [field for field in FIELDS if field in selected]
