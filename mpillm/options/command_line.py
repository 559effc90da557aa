"""Command lines made of fields."""

from __future__ import annotations

import argparse
import functools
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from disagg.errors import ConfigError, nearest
from launch.help_format import HelpFormatter
from launch.launcher import RANK_COMMANDS
from mpillm.options import json_output

if TYPE_CHECKING:
    from mpillm.options.field import Field


# mpillm's options, and their names in vLLM, SGLang, TensorRT-LLM and load clients.
_ALIASES = {
    "--tensor_parallelism": ("--tp", "--tp_size", "--tensor_parallel_size"),
    "--pipeline_parallelism": ("--pp", "--pp_size", "--pipeline_parallel_size"),
    "--moe_expert_parallelism": ("--ep", "--ep_size", "--moe_ep_size"),
    "--model_path": ("--model", "--model_dir"),
    "--max_seq_len": ("--max_model_len", "--context_length"),
    "--max_batch_size": ("--max_num_seqs", "--max_running_requests", "--batch_size"),
    "--max_num_tokens": ("--max_num_batched_tokens", "--max_prefill_tokens"),
    "--enable_kv_cache_reuse": ("--enable_prefix_caching",),
    "--server_target_qps": ("--qps", "--rate", "--request_rate", "--target_qps"),
    "--trtllm_server_urls": ("--base_url", "--endpoint"),
    "--input_mean": ("--isl", "--input_len", "--random_input_len"),
    "--output_mean": ("--osl", "--output_len", "--random_output_len"),
}
_OPTION_OF = {alias: option for option, names in _ALIASES.items() for alias in names}

# Other options of these programs, and what replaces them in mpillm.
_ADVICE = {
    "--model_repo": "it is --triton_model_repo, without the _0 of the first server's",
    "--tensorrt_llm_model_name": "the model repository has it",
    "--oversubscribe": "run-llm-server starts a rank for each GPU of the engine",
    "--tokenizer_dir": "it is --model_path, whose tokenizer is used",
    "--output_dir": "it is --llm_quantizer_outdir of a checkpoint, --engine_dir of an engine",
    "--gpu_memory_utilization": "--kv_cache_free_gpu_mem_fraction is a part of what weights leave free",
    "--mem_fraction_static": "--kv_cache_free_gpu_mem_fraction is a part of what weights leave free",
    "--dp": "the number of ranks sets the number of instances",
    "--data_parallel_size": "the number of ranks sets the number of instances",
}
_LONG_OPTION = re.compile(r"--\w+=")
_NO_BLANK = "\0"  # not in any argument
_MPIRUN_OPTION = re.compile(r"(-n|-np|--np|-H|--host|--hostfile)(=.*)?|-n[0-9]+")  # options of mpirun


class _Help(argparse.Action):
    """--help: the main options or all options; --help TOPIC: one group."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> NoReturn:
        assert isinstance(parser, Parser)
        parser.show_only(values)
        parser.print_help()
        parser.exit()


class _Json(argparse.Action):
    """--json: print only the figures."""

    def __call__(self, *_: Any) -> None:
        json_output.begin()


class Parser(argparse.ArgumentParser):
    """argparse where hyphens equal underscores, without abbreviations; errors name the nearest option.

    Args:
        main: Names of the options that --help shows without a topic. Empty: all.
        figures: The command reports figures to `json_output`; therefore it has the option --json.
        behind: Parser of a command that has parsed its own options; this parser reads the others for it.
    """

    def __init__(
        self,
        main: Sequence[str] = (),
        add_help: bool = True,
        figures: bool = False,
        behind: Parser | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs["prog"] = behind.prog if behind else kwargs["prog"]
        usage = kwargs.pop("usage", f"python -m {kwargs['prog']} [options]")
        lines = textwrap.wrap(usage, 72, subsequent_indent=" " * 11, break_on_hyphens=False)
        kwargs["usage"] = "\n".join(lines)
        super().__init__(allow_abbrev=False, add_help=False, formatter_class=HelpFormatter, **kwargs)
        self._main, self._behind = main, behind
        if add_help:
            self.add_argument(
                *("-h", "--help"),
                action=_Help,
                nargs="?",
                default=argparse.SUPPRESS,
                metavar="TOPIC",
                help="show the main options, the options of a TOPIC, or all" if main else "show the options",
            )

        if figures:
            self.add_argument(
                "--json",
                action=_Json,
                nargs=0,
                default=argparse.SUPPRESS,
                help="print the figures as JSON, and all else to stderr",
            )

    def show_only(self, topic: str | None) -> None:
        """Hide options outside `topic` from the help: a group's title, "all", or None."""
        groups = [group for group in self._action_groups[2:] if group._group_actions]
        if topic is None and self._main:
            titles = ", ".join(str(group.title) for group in groups)
            topics = textwrap.wrap(
                f"--help TOPIC shows more options, --help all shows all. Topics: {titles}.",
                break_on_hyphens=False,
            )
            self.epilog = "\n".join([*topics, "", self.epilog or ""])
        elif topic is None or topic == "all" or not self._main:
            return
        elif topic not in (titles_ := [str(group.title) for group in groups]):
            self.error(
                f"--help {topic}: no such topic{nearest(topic, titles_)}; topics: {', '.join(titles_)}"
            )
        for group in groups:
            for action in group._group_actions:
                if action.dest not in self._main if topic is None else group.title != topic:
                    action.help = argparse.SUPPRESS

    def parse_known(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Do as argparse's `parse_known_args`, where hyphens equal underscores."""
        before, visible = "", []
        for arg in map(underscored, args or ()):
            action = self._option_string_actions.get(before)
            name = arg.partition("=")[0]
            is_value = action is not None and action.nargs is None  # the option before needs one
            is_unknown = not is_value and _LONG_OPTION.match(arg) and name not in self._option_string_actions
            # An unknown option with a blank would be a value of an option that may have one, such as a flag.
            visible.append(arg.replace(" ", _NO_BLANK) if is_unknown else arg)
            before = arg
        values, unknown = self.parse_known_args(visible, namespace)
        return values, [arg.replace(_NO_BLANK, " ") for arg in unknown]

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Do as argparse's `parse_args`, but raise ConfigError for unknown arguments."""
        values, unknown = self.parse_known(args, namespace)
        if unknown:
            raise ConfigError(f"{self.prog}: unknown option {unknown[0]}{self._hint(unknown)}")
        return values

    def _hint(self, unknown: Sequence[str]) -> str:
        """Return a hint about the first of `unknown`."""
        name = unknown[0].partition("=")[0]
        actions = [*self._actions, *(self._behind._actions if self._behind else ())]
        options = [option for action in actions for option in action.option_strings]
        command = self.prog.removeprefix("mpillm ")
        if (option := _OPTION_OF.get(name)) in options:
            return f"; it is {option}"
        if name in _ADVICE:
            return f"; {_ADVICE[name]}"
        if _MPIRUN_OPTION.fullmatch(unknown[0]) and command in RANK_COMMANDS:
            args = unknown[: 1 if re.search("[=0-9]", unknown[0]) else 2]
            return f"; it is mpirun's: `python -m mpillm mpirun {shlex.join(args)} {command} …`"
        if name in ("-n", "-np", "--np"):
            for option in ("--total_gpus", "--world_size"):
                if option in options:
                    return f" (did you mean '{option}'?)"
        return nearest(name, options) if name.startswith("-") else ""

    def texts(self, args: Sequence[str]) -> dict[str, str]:
        """Return the texts of the options by name. Raises ConfigError for unknown arguments."""
        return {name: text for name, text in vars(self.parse_args(args)).items() if text is not None}

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")


def underscored(arg: str) -> str:
    """Return a command-line argument, with underscores in an option's name."""
    name, equals, value = arg.partition("=")
    if not name.startswith("--") or " " in name:  # a value may be options of another command
        return arg
    return "--" + name[2:].replace("-", "_") + equals + value


def add_fields(
    parser: argparse.ArgumentParser,
    fields: Sequence[Field],
    visible: Sequence[Field] | None = None,
    defaults: Mapping[Field, Any] | None = None,
) -> None:
    """Add an option for each field, in its group. A boolean option without a value means true.

    --help has the `visible` fields; None: all. The command's `defaults` override the fields' defaults.
    """
    groups: dict[str, Any] = {}
    for field in fields:
        if not field.is_option:
            continue
        if field.group not in groups:
            groups[field.group] = parser.add_argument_group(field.group)
        text = field.text(defaults[field]) if defaults and field in defaults else field.default_text
        default = f" [default: {text}]" if text else ""
        choices = f" ({', '.join(field.choices)})" if field.choices else ""
        text = (field.description + choices + default).replace("%", "%%")
        options: dict[str, Any] = {
            "help": text if visible is None or field in visible else argparse.SUPPRESS,
            "metavar": field.name.rpartition("_")[2].upper(),
            "nargs": "?" if field.is_flag else None,
            "const": "true" if field.is_flag else None,
            "dest": field.name,
        }
        names = [("--" if len(name) > 1 else "-") + name for name in (field.name, *field.aliases)]
        action = groups[field.group].add_argument(*names, **{**options, **(field.argparse_opts or {})})
        if field.choices:
            action.completer = functools.partial(_offered, field.choices)  # for argcomplete


def _offered(choices: tuple[str, ...], **_: Any) -> tuple[str, ...]:
    return choices
