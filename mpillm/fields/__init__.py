"""Everything that can be configured: one registry from which command lines, --help, docs/options.md and config.json are made.

A new option is one line in the file of its stage: ``name = Field("name", "what it means", parser, default=…, group=GROUP)``. It is then an
option of the commands that show its group, an attribute of `RunConfig`, and a name of this package (`mpillm.fields.name`).
"""

from __future__ import annotations

from collections.abc import Iterable

from disagg.errors import nearest
from mpillm.configurator import Field as Field
from mpillm.fields import (
    checkpoint,
    data,
    deadlines,
    engine_build,
    general,
    generation,
    harness,
    loadgen,
    model,
    results,
    server,
    topology,
    triton,
)
from mpillm.fields.deadlines import DEADLINES as DEADLINES
from mpillm.fields.parsers import integers as integers
from mpillm.fields.parsers import not_negative as not_negative
from mpillm.fields.parsers import positive as positive
from mpillm.fields.parsers import seconds as seconds

_STAGES = (general, topology, model, checkpoint, engine_build, harness, triton, server, data, generation, loadgen, results, deadlines)
FIELDS: tuple[Field, ...] = tuple(value for stage in _STAGES for value in vars(stage).values() if isinstance(value, Field))
BY_NAME: dict[str, Field] = {name: field for field in FIELDS for name in (field.name, *field.aliases)}

# What several commands show of other groups.
SIZES = ("tensor_parallelism", "pipeline_parallelism", "moe_expert_parallelism")
MODEL_AND_LIMITS = ("model_path", "max_batch_size", "max_num_tokens", "max_seq_len")


def shown(*groups: str, also: Iterable[str] = ()) -> list[Field]:
    """What a command has an effect for, and so shows in --help: the fields of `groups`, and those `also` named."""
    others = [BY_NAME[name] for name in also]
    return [field for field in FIELDS if field.group in groups or field in others]


def __getattr__(name: str) -> Field:
    """A field, by its name or one of its other names."""
    try:
        return BY_NAME[name]
    except KeyError:
        raise AttributeError(f"there is no field {name}{nearest(name, BY_NAME)}") from None
