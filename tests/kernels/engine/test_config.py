from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spikeprof.kernels.engine.config import PRESETS, ModelConfig, preset, read_config
from spikeprof.kernels.engine.weights import random_weights

SMALL = ModelConfig(2, 32, 4, 2, 8, 48, 100)


def test_parameters_by_hand() -> None:
    # A layer: q and out 32*32 each, k and v 16*32 each, three of 32*48, two norms of 32.
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48 + 2 * 32
    assert SMALL.parameters_count == 2 * layer + 2 * 100 * 32 + 32
    assert replace(SMALL, tied=True).parameters_count == 2 * layer + 100 * 32 + 32
    assert SMALL.kv_elements_per_token == 2 * 2 * 2 * 8


@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_have_as_many_parameters_as_the_config_says(tied: bool) -> None:
    config = replace(SMALL, tied=tied)
    assert random_weights(config, precision="fp32").bytes_count == 4 * config.parameters_count


def test_presets_are_as_large_as_their_names() -> None:
    millions = {name: config.parameters_count / 1e6 for name, config in PRESETS.items()}
    assert millions == pytest.approx(
        {"tiny": 9.44, "100m": 100.1, "240m": 239.6, "1b": 1100, "3b": 3020, "7b": 7242}, rel=5e-3
    )


def test_an_unknown_preset_is_told_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"model is 'huge': presets are tiny, 100m, 240m, 1b, 3b, 7b; or the path"):
        preset("huge")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layers": 0}, "layers is 0: it must be a positive integer"),
        ({"heads": 3}, "heads is 3: it must be a multiple of kv_heads, 2"),
        ({"head_dim": 7}, "head_dim is 7: rotary embedding needs an even one"),
        ({"window": 0}, "window is 0: it must be a positive integer, or None"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0: it must be a positive number"),
        ({"hidden": "32"}, "hidden is '32': it must be a positive integer"),
    ],
)
def test_sizes_that_cannot_work(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        replace(SMALL, **changes)


LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def written(folder: Path, **changes: object) -> Path:
    found = {key: value for key, value in (LLAMA | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(found))
    return folder


def test_a_config_file(tmp_path: Path) -> None:
    assert read_config(written(tmp_path)) == SMALL
    assert read_config(written(tmp_path, num_key_value_heads="absent")).kv_heads == 4
    assert read_config(written(tmp_path, head_dim=16, sliding_window=7)) == replace(SMALL, head_dim=16, window=7)
    assert read_config(written(tmp_path, sliding_window=7, use_sliding_window=False)).window is None
    assert read_config(written(tmp_path, model_type="mistral")) == SMALL
    newer = written(tmp_path, rope_theta="absent", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert read_config(newer).rope_theta == 5e5


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"vocab_size": "absent"}, r"config.json: the key 'vocab_size' is missing"),
        ({"hidden_act": "gelu"}, r"config.json: hidden_act is 'gelu': only 'silu' is supported"),
        ({"attention_bias": True}, r"config.json: attention_bias is True: only False is supported"),
        ({"rope_scaling": {"rope_type": "llama3"}}, r"rope_scaling is of type 'llama3': only plain rotary embedding"),
        ({"num_attention_heads": 0}, r"config.json: num_attention_heads is 0: it must be a positive integer"),
        ({"num_attention_heads": "4"}, r"config.json: num_attention_heads is '4': it must be a positive integer"),
        ({"rms_norm_eps": "small"}, r"config.json: norm_eps is 'small': it must be a positive number"),
        ({"rope_theta": float("inf")}, r"config.json: rope_theta is inf: it must be a positive number"),
        ({"vocab_size": True}, r"config.json: vocabulary is True: it must be a positive integer"),
        ({"sliding_window": True}, r"config.json: window is True: it must be a positive integer, or None"),
        ({"sliding_window": 2.5}, r"config.json: window is 2.5: it must be a positive integer, or None"),
        ({"model_type": "granite"}, r"config.json: model_type is 'granite': it can be llama, mistral"),
        ({"num_key_value_heads": 3}, r"config.json: heads is 4: it must be a multiple of kv_heads, 3"),
    ],
)
def test_a_config_file_that_cannot_be_used(tmp_path: Path, changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_config(written(tmp_path, **changes))


def test_a_config_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json: cannot be read: No such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: is not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config.json: must be a JSON object"):
        read_config(tmp_path)
