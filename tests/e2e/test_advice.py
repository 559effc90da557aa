"""What a person is told to type works: the commands of README.md, docs/, --help and messages, and the cures
that messages name.

`tests/helpers/advice.py` collects the commands. Each has its place in `WAYS`: typed here, or why it can't be.
A command without one fails `test_every_command_has_a_place`, so that no advice is printed that nobody has
tried.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from mpillm.options.fields import BY_NAME
from mpillm.options.options import parse_run
from tests.helpers.advice import ROOT, Advice, command_names, commands, strings
from tests.helpers.make_checkpoint import make_checkpoint
from tests.helpers.make_folder import make_folder
from tests.helpers.support import DONE, TEST_FAILED, USAGE, Ended, Starter

MODEL = "build/models/smollm2-135m"
SHORT = "--max_output_len 2 --min_query_count 8"  # appended, as a test's time is dear
DUMMY_RUN = (
    "python -m mpillm mpirun -n 2 run --core_type dummy --benchmarks llama2-70b --model_scale tiny"
    " --accuracy_target 0.999"
)
RUNS = tuple(
    f"{DUMMY_RUN} --scenarios Server --server_target_qps 500 --log_dir {folder} {kind}"
    for folder, kind in (
        ("runs/server", ""),
        ("runs/server-accuracy", "--test_mode AccuracyOnly"),
        ("runs/server-test06", "--compliance_test TEST06"),
    )
)
JUDGED = (
    *RUNS,
    "python -m mpillm accuracy runs/server-accuracy",
    "python -m mpillm compliance runs/server-test06",
)
QUANTISED = re.findall(
    r"```python\n(.*?)```",
    (ROOT / "docs" / "explain" / "quantization.md").read_text(encoding="utf-8"),
    re.DOTALL,
)[0]
TRITON_REPOSITORY = (
    "mkdir -p build/triton_model_repo_0/m; echo 'name: \"m\"' > build/triton_model_repo_0/m/config.pbtxt"
)
OPEN_ORCA = """import pandas
rows = {"tok_input": [[1]] * 48, "tok_input_length": [1] * 48, "output": ["A pear."] * 48}
pandas.DataFrame(rows).to_pickle("open_orca.pkl")"""
DISAGG_YAML = (
    "python -m mpillm generate-disagg-config --mode disaggregated --world_size 8 --ctx_tp_size 2"
    " --output disagg.yaml"
)


@dataclass(frozen=True)
class Typed:
    """Is typed as it stands, with `more` behind it, after the commands `before`.

    It ends with `code` and says `says`.
    """

    more: str = ""
    code: int = DONE
    expected: str = ""
    before: tuple[str, ...] = ()


@dataclass(frozen=True)
class Parsed:
    """Does not run here for a reason; its options are those of `run`, and are read."""

    why: str


@dataclass(frozen=True)
class Elsewhere:
    """Is typed by another test, or by nobody for a reason."""

    why: str


NO_GPU = Typed(code=USAGE, expected=r"there is no NVIDIA GPU|--device cuda: \d ranks, 0 GPUs")
WAYS: dict[str, Typed | Parsed | Elsewhere] = {
    r"make (fuzz|test-wheel)": Elsewhere("make test has the fuzzers' examples, .ci/run the wheel's tests"),
    r"make (run|install|docs)": Elsewhere("installs, or writes the pages: whoever builds this types it"),
    r"(\S+ )?make (test(-slow|-cross)?|check)": Elsewhere("these are the tests"),
    r".*--dataset_path agentic\.jsonl.*": Elsewhere(
        "measured with MLCommons' file, which is not in the repository"
    ),
    r".*--core_type torch .*--dataset_path talks\.jsonl.*": Typed(
        "--max_output_len 2 --num_conversations 2",
        expected="2 of 2 ended",
        before=("""echo '{"prompt": [5, 6]}' > talks.jsonl""",),  # the model has no chat template
    ),
    r".* --dataset_path BurstGPT_1\.csv .*": Parsed("a published file of 60 MB"),
    r".* --synthetic_conversations .*": Parsed("100 conversations take minutes here"),
    r"make size": Elsewhere("tests/unit/tools/test_size.py has what it counts"),
    r"make prebuild": Elsewhere("not ours: the page says that it is not needed"),
    r"(.* )?make (generate|run)_.*": Elsewhere(
        "tests/e2e/test_pipeline.py and tests/unit/commands/test_pipeline_page.py"
    ),
    r"python -m mpillm mpirun {} {} …": Elsewhere("tests/unit/commands/test_what_users_type.py"),
    r".* report (mpillm-runs/.*|latest)": Elsewhere("a run must be there: tests/unit/report/test_page.py"),
    r".* launch-triton-server .*": Elsewhere(
        "a repository must be there: tests/unit/triton/test_launch_triton_server.py"
    ),
    r".* fill-template .*": Elsewhere("a template must be there: tests/unit/triton/test_fill_template.py"),
    r".* trtllm-build .*": Elsewhere("tests/unit/commands/test_reference_commands.py"),
    r".* fetch-model .*": Elsewhere("a download: tests/unit/data/test_fetch_model.py"),
    r"make (test-)?slurm|make test-hosts": Elsewhere("they need root, and Slurm is installed"),
    r"srun --mpi=list|salloc .*": Elsewhere("Slurm's own: there is none here"),
    r".* sbatch .*": Elsewhere(
        "tests/unit/launch/test_sbatch.py, and with a real Slurm tests/e2e/test_slurm.py"
    ),
    r".* doctor --cluster-report .*": Elsewhere("minutes: tests/e2e/test_doctor.py"),
    r".* selftest --.*": Elsewhere("minutes: tests/e2e/test_selftest.py"),
    r"srun .* doctor": Elsewhere("there is no Slurm here: tests/e2e/test_doctor.py, under mpirun"),
    r".*mpirun -n \d doctor( --json)?": Typed(expected="launcher"),
    r"srun --mpi=\S+": Elsewhere("an option of srun's: tests/e2e/test_launchers.py"),
    r"srun .*": Parsed("there is no Slurm here"),
    r"MLPERF_DISAGG_LAUNCH_TYPE=\S+ srun .*": Elsewhere("with a real Slurm: tests/e2e/test_slurm.py"),
    r".* --core_type trtllm_(endpoint|disagg) .*": Elsewhere(
        "a server must be there: tests/e2e/test_endpoint.py"
    ),
    r".* (run|serve) (.* )?--server=.*": Elsewhere(
        "a server's program must be there: test_own_servers.py and test_triton.py here, and tests/peers"
    ),
    r".* run .*--harness=.*": Elsewhere(
        "another client's program must be there: tests/peers/test_other_harness.py"
    ),
    r"mpirun .* run --core_type trtllm_(executor|hlapi) .*": Elsewhere(
        "TensorRT-LLM must be there: tests/e2e/test_trtllm.py"
    ),
    r"mpirun -n (9|17) .*": Parsed("more ranks than fit here, and a model of 140 GB or more"),
    r".*mpirun -n \d (python -m mpillm )?run --url .*": Elsewhere(
        "a server must be there: tests/e2e/test_servers_table.py"
    ),
    r"python -m mpillm mpirun -n (N|{}) doctor": Elsewhere("a form: N is the user's"),
    r".* bench endpoint --url .*": Elsewhere(
        "a server must be there: tests/unit/experiments/test_bench_endpoint.py"
    ),
    r".* endpoints-submission --url .*": Elsewhere(
        "a server must be there: tests/unit/submission/test_endpoints_submission.py"
    ),
    r".* agentic-submission --url .*": Elsewhere(
        "a server must be there: tests/unit/submission/test_agentic_submission.py"
    ),
    r".* bench endpoint --null": Elsewhere(
        "20,000 requests; tests/unit/experiments/test_bench_endpoint.py sends 100"
    ),
    r".* (triton-client|e2e-test|bench core-model) .*|.* benchmarks triton": Elsewhere(
        "a tritonserver must be there: tests/e2e/test_triton_clients.py"
    ),
    r"python -m mpillm (triton-client (tokens|text)|e2e-test|bench core-model)": Elsewhere(
        "names of commands, in messages: tests/unit/commands/test_reference_commands.py"
    ),
    r".* benchmarks (http --peers|harness-agreement) .*": Elsewhere(
        "other people's programs must be there: make test-peers"
    ),
    r".* benchmarks products": Typed("--model_path tiny-llama --rows 1,8", expected="GFLOP"),
    r".* benchmarks scale( --instances 64,512)?": Typed(
        "--instances 8,16", expected="rank 0's control in the test"
    ),
    r".* benchmarks http": Typed(
        "--repeats 1 --parts streams,clients --requests 400", expected="tokens/s.*\\n.*trtllm_endpoint"
    ),
    r"make (test-)?triton": Elsewhere("it installs a real tritonserver"),
    r"make test-peers": Elsewhere("it installs 4 GB and takes half an hour"),
    r".* bench table.*": Elsewhere("whole runs of a model of 16 GB, on a GPU"),
    r".* --config_file closed/NVIDIA/.*": Elsewhere(
        "NVIDIA's repository is not here; tests/unit has files of its form"
    ),
    r"mpirun -n N .*--model_path llama3.1-8b.*": Parsed("a model of 16 GB"),
    r"\$R .*": Parsed("a model of 140 GB"),
    r".* --device cuda.*|.* benchmarks (agreement|all-reduce|decode|handoff).*": NO_GPU,
    r"python -m mpillm [a-z-]+( RUN_DIR( --mbxp evaluated_test.json)?)?|"
    r"mpirun -n N python -m mpillm run": Elsewhere(
        "names of commands, in sentences: test_the_names_of_commands"
    ),
    r".* serve .*--server_role .*": Elsewhere("tests/e2e/test_disaggregated_servers.py"),
    r".* serve .*": Elsewhere("until a signal ends it: tests/e2e/test_serve.py"),
    r".* --help( all)?": Typed(expected="usage: python -m mpillm run"),
    r".* plan --disagg_config .*": Typed(
        before=(DISAGG_YAML, "tee recipe.yaml deploy.yaml < disagg.yaml"), expected="gen"
    ),
    r".* plan --world_size 8194 .*": Typed(),
    r".* plan --explain max_batch_size .*": Typed(expected="max_batch_size is "),
    r".* plan .*": Typed(expected="ranks on 1 node"),
    r".* generate-disagg-config --mode .*": Typed("&& cat disagg.yaml", expected="context_servers"),
    r"mpirun .* generate-disagg-config .*": Typed("&& cat disagg.yaml", expected="context_servers"),
    r".* run --benchmarks llama2-70b .*--model_scale tiny.*": Typed(
        f"{SHORT} --server_target_qps 200", expected="LoadGen"
    ),
    r".* --config_file mine.yaml .*": Elsewhere("an example of what rerun prints: tests/e2e/test_rerun.py"),
    r".* run --core_type dummy .*": Typed(expected=r"LoadGen +VALID"),
    r".* run-harness .*--world_size 17 .*": Elsewhere("more ranks than fit here: tests/e2e/test_slurm.py"),
    r".* run-harness --core_type dummy .*": Typed(expected="Server"),
    r".* run-harness --benchmarks=llama2,moe .*": Typed(
        f"{SHORT} --server_target_qps 200", expected="mixtral-8x7b"
    ),
    r".* run .*build/(checkpoints|engines)/smollm2.*": Typed(
        SHORT, expected="LoadGen", before=(f"python - <<'END'\n{QUANTISED}END",)
    ),
    r".* run .*(smollm2|--model_path DIR).*": Typed(SHORT, expected=r"sample 1: "),
    r".* bench routing .*": Typed(
        "--offline_samples 2000 --qps 200 --server_s 1 --idle_s 1 --repeats 1",
        expected="part of aiohttp's p99",
    ),
    r".* benchmarks soak.*": Typed("--samples 2000000 --duration 6", expected="bytes/sample"),
    r".* benchmarks engine .*--against vllm.*": Elsewhere("tests/peers/test_servers.py"),
    # The test model has a token for each letter.
    r".* benchmarks engine .*--dataset_path examples/.*": Typed(
        "--max_prompt_len 900 --output_len 2 --num_prompts 2 --repeats 1", expected="draft tokens of a round"
    ),
    r".* benchmarks engine .*build/head/.*": Elsewhere(
        "its head takes half an hour to train: tests/e2e/test_speculation.py has one of random numbers"
    ),
    r".* benchmarks engine --model_path .*": Typed(
        "--output_len 2 --num_prompts 4 --repeats 1", expected="tokens/s"
    ),
    r".* benchmarks load .*": Typed("--repeats 1", expected="engine"),
    r".* benchmarks precision .*": Typed("--num_made 4 --made_len 8 --output_len 2", expected="tokens alike"),
    r".* benchmarks products .*": Typed("--rows 1", expected="GFLOP/s"),
    r".* benchmarks dataset.*": Typed("--repeats 1", expected="samples"),
    r".* generate-engines --model_path build/models.*": Typed(expected="engine"),
    r".* generate-(engines|triton-config) .*": Typed("--dry_run", expected="build"),
    r".* run-llm-server --core_type=\{\} .*": Elsewhere(
        "a name is put in: tests/e2e/test_disaggregated_servers.py"
    ),
    r".* run-llm-server .*": Typed(
        "--dry_run", expected="tritonserver --|trtllm-serve ", before=(TRITON_REPOSITORY,)
    ),
    r".* accuracy .*--evaluated .*|python eval_accuracy.py .*|python -c .*read_parquet.*": Elsewhere(
        "tests/unit/submission/test_accuracy.py, and a program of mlcommons/inference"
    ),
    r".* accuracy .*--inference_repo .*": Elsewhere(
        "tests/unit/submission/test_evaluator.py: it runs a program of mlcommons/inference"
    ),
    r".* accuracy .*--mbxp .*": Elsewhere(
        "tests/unit/submission/test_accuracy.py: it takes a file that another program writes"
    ),
    r".* accuracy mpillm-runs/accuracy --dataset_path .*": Typed(
        before=(
            *RUNS[1:2],
            "mv runs mpillm-runs && mv mpillm-runs/server-accuracy mpillm-runs/accuracy",
            f"python -c '{OPEN_ORCA}' && mkdir MODEL_DIR && cp tokenizer.json MODEL_DIR",
        ),
        expected="rouge1",
    ),
    r".* (rerun|certify) .*": Elsewhere("tests/e2e/test_rerun.py"),
    r".* (advise|find-max-qps|ab|sweep) .*|.* compare (DIR|mpillm-runs/first) .*": Elsewhere(
        "several runs each: tests/e2e/test_experiments.py"
    ),
    r".* (accuracy|compliance) {}": Elsewhere(
        "tests/e2e/test_submission_run.py types it, and test_typed with a folder"
    ),
    r".* accuracy runs/server-accuracy": Typed(before=RUNS[1:2], expected="rouge1"),
    r".* compliance runs/server-test06": Typed(before=RUNS[2:], expected="TEST06 verification complete"),
    r".* compliance mpillm-runs/test06": Typed(
        before=(RUNS[2], "mkdir mpillm-runs; mv runs/server-test06 mpillm-runs/test06"),
        expected="TEST06 verification complete",
    ),
    r".* submission runs/\* .*": Typed(before=JUDGED, code=TEST_FAILED, expected="the model is a tiny one"),
    r".* submission mpillm-runs/\* .*": Typed(
        before=(*JUDGED, "mv runs mpillm-runs"), code=TEST_FAILED, expected="the model is a tiny one"
    ),
}
ADVICE = commands()


def way(command: str) -> str:
    """Return the key of the first way that fits."""
    return next((pattern for pattern in WAYS if re.fullmatch(pattern, command)), "")


TO_TYPE = {
    re.sub(r"^(\.venv/bin/)?python3? ", "python ", advice.text): advice
    for advice in ADVICE
    if isinstance(WAYS.get(way(advice.text)), Typed)
}


def test_every_command_has_a_place() -> None:
    lost = [f"{advice.where}: {advice.text}" for advice in ADVICE if not way(advice.text)]
    assert not lost, "say in WAYS how these are tried:\n" + "\n".join(lost)
    unused = WAYS.keys() - {way(advice.text) for advice in ADVICE}
    assert not unused, f"nobody is told to type these any more: {unused}"
    assert len(TO_TYPE) > 20


@pytest.mark.parametrize(
    "advice", [pytest.param(a, id=a.text) for a in ADVICE if isinstance(WAYS.get(way(a.text)), Parsed)]
)
def test_options_of_what_is_not_run(advice: Advice) -> None:
    settings = dict(re.fullmatch(r'(?:export )?(\w+)="(.*)"', setting).groups() for setting in advice.setting)  # type: ignore[union-attr, misc]
    command = re.sub(r"\$(\w+)", lambda match: settings.get(match[1], match[0]), advice.text)
    parse_run(shlex.split(command.partition(" run ")[2]))


def test_the_names_of_commands() -> None:
    named = {
        match[1]
        for advice in ADVICE
        if (match := re.match(r".*-m (mpillm bench [a-z-]+|(mpillm|benchmarks) [a-z0-9-]+)", advice.text))
    }
    assert named <= {*command_names(), "mpillm trtllm-build"}, named - {*command_names()}


def test_commands_in_messages_stand_between_backticks() -> None:
    """Then this test finds them, and a person sees where they end."""
    bare = [
        f"{where}: {text}"
        for where, text in strings()
        for line in re.sub(r"`[^`]*`", "", text).splitlines()
        if re.search(r"-m (mpillm|benchmarks) [a-z]", line)
        and not re.match(r"\s*(usage: )?(mpirun -n \S+ )?python -m (mpillm|benchmarks) ", line)
    ]
    assert bare == []


def test_options_in_messages_exist() -> None:
    """Every --option that a sentence in the sources names is one of ours, or of a program that we start."""
    known = {*BY_NAME, *(alias for field in BY_NAME.values() for alias in field.aliases)}
    # those of single commands
    packages = ("benchmarks", "launch", "mpillm")
    for path in (path for package in packages for path in (ROOT / package).rglob("*.py")):
        known.update(
            re.findall(
                r'(?:Field\(|add_argument\(|\badd\(|TensorOption\()\s*(?:"-\w",\s*)?"-*([a-z_]+)"',
                path.read_text(encoding="utf-8"),
            )
        )
        known.update(re.findall(r"^    (\w+) = option\(", path.read_text(encoding="utf-8"), re.MULTILINE))
        known.update(
            re.findall(r"^    (\w+) = \w+\.\w+\.but\(", path.read_text(encoding="utf-8"), re.MULTILINE)
        )
    sentences = [(where, text) for where, text in strings() if " " in text]
    named = {
        (where, option)
        for where, text in sentences
        for option in re.findall(r"(?<![\w-])--([a-z][\w-]*)", text)
    }
    assert (
        sorted((where, option) for where, option in named if option.replace("-", "_") not in known | OTHERS)
        == []
    )


OTHERS = {
    *("help", "version", "dry_run", "start_deadline"),
    # sbatch's and srun's, many of which `mpillm sbatch` has, too
    *("nodes", "ntasks", "ntasks_per_node", "gpus_per_node", "gpus_per_task", "cpus_per_task", "time", "mpi"),
    *("container_image", "container_mounts", "container_workdir", "nodelist", "submit", "wait", "log_root"),
    *("job_name", "account", "partition", "output", "script"),
    *("no_enable_prefix_caching", "disable_radix_cache"),  # vLLM's and SGLang's
    *("kv_transfer_config", "disable_log_stats", "profiler_config"),  # vLLM's
    *("mem_fraction_static", "speculative_algorithm", "attn_dp_size", "dp_size"),  # SGLang's
    *("cuda_graph_backend_decode", "cuda_graph_backend_prefill", "disaggregation_transfer_backend"),
    *("vboost", "power_limit", "kill_on_bad_exit", "local_dir"),  # nvidia-smi's, srun's and hf's
    "proxy_id",  # of MPICH's proxies
    "init",  # of git submodule update
    "config",  # trtllm-serve's
    # the submission checker's, mpirun's, pip's, tritonserver's, trtllm-serve's and TensorRT-LLM's scripts'
    *(
        "input",
        "np",
        "allow_run_as_root",
        "oversubscribe",
        "bind_to",
        "stdin",
        "prtemca",
        "with_ft",
        "enable_recovery",
        "mca",
        "hostfile",
        "host",
        "shm_size",
    ),
    *(
        "map_by",
        "mpi",
        "no_deps",
        "no_input",
        "only_binary",
        "dest",
        "checkpoint_dir",
        "output_dir",
        "model_dir",
        "tp_size",
        "pp_size",
    ),
    *(
        "moe_tp_size",
        "moe_ep_size",
        "model_repository",
        "grpc_port",
        "http_port",
        "metrics_port",
        "backend_config",
        "load_model",
    ),
    *("model_control_mode", "disable_auto_complete_config", "port", "backend", "extra_llm_api_options"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model with SmolLM2's numbers of heads, and a tokenizer of bytes."""
    return make_checkpoint(tmp_path_factory.mktemp("model") / "smollm2")


class Shell:
    """Is a person's shell in a folder with this program installed and the model fetched."""

    def __init__(self, starter: Starter, model: Path) -> None:
        self.starter, folder = starter, starter.folder
        make_folder(folder)
        (folder / "build" / "models").mkdir(parents=True)
        (folder / MODEL).symlink_to(model)
        (folder / "DIR").symlink_to(model)
        (folder / "tokenizer.json").symlink_to(model / "tokenizer.json")
        (folder / "examples").symlink_to(ROOT / "examples")
        programs = folder / "programs"
        programs.mkdir()
        mpirun = Path(sys.executable).with_name("mpirun")
        for name, line in {
            **dict.fromkeys(("python", "python3"), f'exec {sys.executable} "$@"'),
            # root, and more ranks than cores
            "mpirun": f'exec {mpirun} --allow-run-as-root --oversubscribe --bind-to none "$@"',
        }.items():
            (programs / name).write_text(f"#!/bin/sh\n{line}\n")
            (programs / name).chmod(0o755)
        self.path = str(programs)

    def type(self, *lines: str) -> Ended:
        """Type lines one after another; all but the last must succeed."""
        script = "\n".join([f"export PATH={self.path}:$PATH", "set -e", *lines])
        return self.starter.command(["bash", "-c", script]).end(240)


@pytest.fixture
def shell(one: Starter, model: Path) -> Shell:
    return Shell(one, model)


@pytest.mark.slow
@pytest.mark.parametrize("advice", [pytest.param(advice, id=text) for text, advice in TO_TYPE.items()])
def test_typed(shell: Shell, advice: Advice) -> None:
    how = WAYS[way(advice.text)]
    assert isinstance(how, Typed)
    if how is NO_GPU:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU: tests/gpu and test_gpu_layouts are for it")
    ended = shell.type(*how.before, *advice.setting, f"{advice.text} {how.more}").must(how.code)
    assert re.search(how.expected, ended.out + ended.err), ended


# --- the cures that messages name ---

RUN = "python -m mpillm mpirun -n 2 run"
CURES = {  # what fails, what it says, and how the words of the advice are added
    "no model": (RUN, "or a preset with random weights (`--model_path tiny-llama`)", f"{RUN} --model_path"
                                                                                     f" tiny-llama {SHORT}"),
    "no rate": (
        f"{RUN} --core_type dummy --scenarios Server",
        "--scenarios Server needs --server_target_qps",
        f"{RUN} --core_type dummy --scenarios Server --server_target_qps 1000",
    ),
    "a long prompt": (
        f"{RUN} --model_path {MODEL} --dataset_path long.jsonl --max_num_tokens 100",
        "does not fit --max_num_tokens 100 without `--enable_chunked_context true`",
        f"{RUN} --model_path {MODEL} --dataset_path long.jsonl --max_num_tokens 100 --enable_chunked_context"
        f" true {SHORT}",
    ),
    "no engine": (
        f"{RUN} --model_path {MODEL} --engine_dir build/engines/mine",
        "`python -m mpillm generate-engines` makes",
        f"python -m mpillm generate-engines --model_path {MODEL} --engine_dir build/engines/mine"
        f" && {RUN} --model_path {MODEL} --engine_dir build/engines/mine {SHORT}",
    ),
    "a dry run": (
        f"{RUN} --core_type dummy --dry_run",
        "`python -m mpillm plan` shows what a run would do",
        "python -m mpillm plan --world_size 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CURES)
def test_cure(shell: Shell, name: str) -> None:
    """The command fails and names a cure; with the cure it works."""
    fails, message, cured = CURES[name]
    (shell.starter.folder / "long.jsonl").write_text('{"prompt": "' + "a" * 300 + '"}\n')
    assert message in shell.type(fails).must(USAGE).message
    shell.type(cured).must(DONE)
