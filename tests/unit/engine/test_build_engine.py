"""Engines of the torch core: files that hold what each rank's engine holds, and what makes them unfit for a
run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from disagg.errors import ConfigError
from mpillm.engine.build_engine import build
from mpillm.engine.shape.engine_config import EngineConfig
from mpillm.engine.shape.engine_folder import layouts, read_engine
from mpillm.engine.shape.layout import RankLayout
from mpillm.engine.shape.model_info import check_model, model_info
from mpillm.engine.shape.read_config import load_model_config
from mpillm.engine.weights.quantize import quantize
from mpillm.engine.weights.rank_weights import EngineWeights, Shards, read_embedding
from mpillm.engine.weights.sources import Checkpoint
from tests.helpers.engine_configs import engine_config
from tests.helpers.oracle import Tokens
from tests.helpers.presets import save_preset
from tests.helpers.torch_cores import answer, make_batch, make_core


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    save_preset("tiny-llama", folder)
    return folder


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "mixtral"
    save_preset("tiny-mixtral", folder)
    return folder


@pytest.fixture(scope="module")
def prompts() -> Tokens:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 512, n).tolist() for n in (1, 20, 47)]


def config(model: Path | str, **options: Any) -> EngineConfig:
    return engine_config(model, **options)


@pytest.mark.parametrize("quantization", ["none", "int8", "fp8"])
@pytest.mark.parametrize(
    ("preset", "sizes"),
    [
        ("llama", (1, 1, 1)),
        ("llama", (2, 2, 1)),
        ("llama", (8, 1, 1)),
        ("mixtral", (2, 1, 2)),
        ("mixtral", (4, 3, 2)),
    ],
    ids=str,
)
def test_each_rank_gets_what_it_would_have_cut(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    preset: str,
    sizes: tuple[int, int, int],
    quantization: str,
) -> None:
    folder = request.getfixturevalue(preset)
    build(folder, tmp_path / "engine", *sizes, dtype="bfloat16", quantization=quantization)
    engine = read_engine(tmp_path / "engine")
    assert (engine.layout, engine.dtype, engine.quantization) == (
        RankLayout(*sizes),
        "bfloat16",
        quantization,
    )
    model = load_model_config(str(folder))
    assert len(list((tmp_path / "engine").iterdir())) == sizes[0] * sizes[1] + 1
    for layout in layouts(engine.layout):
        shards = Shards(Checkpoint(folder, model), model, layout, torch.bfloat16, quantization=quantization)
        built = EngineWeights(engine, model, layout, "cpu")
        names = {
            name.removesuffix(".weight")
            for name in load_file(engine.file(layout))
            if name.endswith(".weight")
        }
        for name in names:
            if "_proj" not in name and ".w" not in name:
                assert torch.equal(built.get(name), shards.get(name))
                continue
            (weight, scales), (wanted, wanted_scales) = built.matrix(name), shards.matrix(name)
            assert weight.dtype == wanted.dtype and torch.equal(
                weight.view(torch.int8), wanted.view(torch.int8)
            ), name
            assert (scales is None) == (wanted_scales is None) == (quantization == "none")
            assert scales is None or (wanted_scales is not None and torch.equal(scales, wanted_scales))


def test_the_whole_embedding_of_several_ranks(llama: Path, tmp_path: Path) -> None:
    """A head that guesses needs it on the first of them."""
    build(llama, tmp_path / "engine", 4)
    model = load_model_config(str(llama))
    wanted = Checkpoint(llama, model).get("model.embed_tokens.weight")
    for options in ({"engine_dir": str(tmp_path / "engine")}, {}):
        info = check_model(config(llama, tp_size=4, tp_rank=0, dtype="float32", **options))
        assert torch.equal(read_embedding(info, "cpu", dummy=False), wanted.float())
    info = check_model(config("tiny-llama", tp_size=4, tp_rank=0, dtype="float32"))
    assert torch.equal(read_embedding(info, "cpu", dummy=True), wanted.float())


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_answers_are_those_of_the_checkpoint(
    llama: Path, tmp_path: Path, prompts: Tokens, quantization: str
) -> None:
    build(llama, tmp_path / "engine", quantization=quantization)
    core = make_core(llama, engine_dir=str(tmp_path / "engine"))
    assert (core.info.quantization, core.info.dtype) == (quantization, "float32")
    assert answer(core, make_batch(prompts)) == answer(
        make_core(llama, quantization=quantization), make_batch(prompts)
    )


def test_weights_are_used_where_they_lie_in_the_file(llama: Path, tmp_path: Path) -> None:
    """Weights are mapped, not copied: ranks share them, and they are read when they are used."""
    build(llama, tmp_path / "engine")
    core = make_core(llama, engine_dir=str(tmp_path / "engine"))
    assert core.worker is not None
    file = str(tmp_path / "engine" / "rank0.safetensors")
    address = core.worker.part.model.embedding.data_ptr()
    ranges = [
        line.split()[0].split("-")
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(file)
    ]
    assert any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


def test_a_preset_and_a_quantised_checkpoint_can_be_built_from(
    llama: Path, tmp_path: Path, prompts: Tokens
) -> None:
    build("tiny-llama", tmp_path / "preset")
    assert answer(
        make_core("tiny-llama", engine_dir=str(tmp_path / "preset")), make_batch(prompts)
    ) == answer(make_core(llama), make_batch(prompts))
    quantize(llama, tmp_path / "int8", "int8")
    build(tmp_path / "int8", tmp_path / "engine")
    wanted = answer(make_core(tmp_path / "int8"), make_batch(prompts))
    for model in (tmp_path / "int8", llama):  # what it was built from, and what that was quantised from
        assert answer(make_core(model, engine_dir=str(tmp_path / "engine")), make_batch(prompts)) == wanted


def test_config_json(llama: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    written = build(
        llama,
        tmp_path / "engine",
        2,
        3,
        build_config={"max_batch_size": 7},
        quantization="fp8",
        progress=lines.append,
    )
    assert json.loads((tmp_path / "engine" / "config.json").read_text()) == written
    assert len(lines) == 6
    pretrained = written["pretrained_config"]
    assert pretrained["mapping"] == {
        "world_size": 6,
        "tp_size": 2,
        "pp_size": 3,
        "moe_tp_size": 2,
        "moe_ep_size": 1,
    }
    assert pretrained["quantization"] == {"quant_algo": "FP8", "kv_cache_quant_algo": None}
    assert pretrained["architecture"] == "LlamaForCausalLM"
    assert pretrained["dtype"] == "float32" and pretrained["num_hidden_layers"] == 6
    assert written["build_config"] == {"max_batch_size": 7}


def test_the_memory_of_weights_is_that_of_their_files(mixtral: Path, tmp_path: Path) -> None:
    build(mixtral, tmp_path / "engine", 2, 2, 2, quantization="int8")
    for rank, layout in enumerate(layouts(RankLayout(2, 2, 2))):
        info = model_info(
            config(
                mixtral,
                engine_dir=str(tmp_path / "engine"),
                tp_size=2,
                pp_size=2,
                ep_size=2,
                tp_rank=layout.tp_rank,
                pp_rank=layout.pp_rank,
            )
        )
        assert info.n_bytes == sum(
            tensor.nbytes for tensor in load_file(tmp_path / "engine" / f"rank{rank}.safetensors").values()
        )


# --- what does not fit ---


@pytest.fixture(scope="module")
def engine(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines") / "engine"
    build(llama, folder, 2)
    return folder


def test_an_engine_for_another_run(llama: Path, engine: Path, tmp_path: Path) -> None:
    fitting: dict[str, Any] = {"engine_dir": str(engine), "tp_size": 2}
    check_model(config(llama, **fitting))
    save_preset("tiny-llama", tmp_path / "other")
    tensors = load_file(tmp_path / "other" / "model.safetensors")
    other = tmp_path / "other"
    for change, message in (
        ({"tp_size": 1}, r"built for TP 2, PP 1, EP 1; instance 0 has TP 1, PP 1, EP 1"),
        ({"pp_size": 2}, r"built for TP 2, PP 1, EP 1; instance 0 has TP 2, PP 2, EP 1"),
        ({"dtype": "bfloat16"}, "built with dtype float32, not with --dtype bfloat16"),
        ({"quantization": "int8"}, "built with quantization none, not with --quantization int8"),
        ({"load_format": "dummy"}, "--load_format dummy makes random weights"),
        ({"engine_dir": str(llama)}, r"config\.json: not an engine of format 1"),
        ({"engine_dir": str(tmp_path)}, r"^--engine_dir .*: no config\.json in it \(`python -m"),
        (
            {"engine_dir": str(tmp_path / "none")},
            r"^--engine_dir .*none: no such folder \(`python -m mpillm generate-engines",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            check_model(config(llama, **fitting | change))
    check_model(config(other, **fitting))  # the same weights elsewhere
    save_file(
        tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1},
        other / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(ConfigError, match=r"built from other weights than those of .*other; build it again"):
        check_model(config(other, **fitting))
    with pytest.raises(ConfigError, match="built from other weights than those of tiny-llama"):
        check_model(config("tiny-llama", **fitting))
    raw = json.loads((other / "config.json").read_text()) | {"rope_theta": 500000.0}
    (other / "config.json").write_text(json.dumps(raw))
    with pytest.raises(
        ConfigError, match=r"built from another model than .*other: rope_theta 10000\.0, not 500000\.0"
    ):
        check_model(config(other, **fitting))


def test_a_damaged_engine(llama: Path, engine: Path, tmp_path: Path) -> None:
    """Whichever rank's file is damaged, the rank that looks first reports it."""
    copy = tmp_path / "engine"
    shutil.copytree(engine, copy)
    file = copy / "rank1.safetensors"
    whole, fitting = file.read_bytes(), config(llama, engine_dir=str(copy), tp_size=2)
    tensors = load_file(file)
    name = "model.layers.2.self_attn.qkv_proj.weight"

    def refused(message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            check_model(fitting)

    file.write_bytes(whole[:-1])
    refused(r"rank1\.safetensors: truncated")
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    refused(rf"rank1\.safetensors: tensor {name}: expected F32 \[128, 128\], found none")
    save_file(tensors | {name: tensors[name].bfloat16()}, file)
    refused(rf"tensor {name}: expected F32 \[128, 128\], found BF16 \[128, 128\]")
    save_file(tensors | {"more.weight": torch.zeros(1)}, file)
    refused(r"tensor more\.weight: expected none, found F32 \[1\]")
    file.unlink()
    refused(r"rank1\.safetensors: no such file")
    file.write_bytes(whole)
    check_model(fitting)
    raw = json.loads((copy / "config.json").read_text())
    del raw["pretrained_config"]["mapping"]["pp_size"]
    (copy / "config.json").write_text(json.dumps(raw))
    refused(r"config\.json: not an engine's config\.json \(KeyError: 'pp_size'\)")


def test_what_cannot_be_built(
    llama: Path, mixtral: Path, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "engine"
    wrong: tuple[tuple[Path, tuple[int, int, int], dict[str, Any], str], ...] = (
        (llama, (3, 1, 1), {}, "tensor_parallel_size 3 does not divide the 8 attention heads"),
        (llama, (0, 1, 1), {}, "build: tp_size 0: must be at least 1"),
        (llama, (1, 7, 1), {}, "pipeline_parallel_size 7 is more than the 6 layers"),
        (llama, (2, 1, 2), {}, "has no experts"),
        (mixtral, (2, 1, 3), {}, "moe_expert_parallel_size 3 does not divide"),
        (llama, (1, 1, 1), {"dtype": "float8"}, "--dtype float8: not one of auto, float32, bfloat16"),
        (llama, (1, 1, 1), {"quantization": "int3"}, "--quantization int3: not one of"),
        (tmp_path / "none", (1, 1, 1), {}, "no such folder, and no such preset"),
    )
    for model, sizes, options, message in wrong:
        with pytest.raises(ConfigError, match=message):
            build(model, target, *sizes, **options)
    with pytest.raises(ConfigError, match="exists already"):
        build(llama, engine)
    with pytest.raises(ConfigError, match="holds the model to build from"):
        build(llama, llama, overwrite=True)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1000))
    with pytest.raises(ConfigError, match="are needed on this disk"):
        build(llama, target)
    assert not list(tmp_path.iterdir())
