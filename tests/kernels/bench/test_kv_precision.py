from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from spikeprof.kernels.attention import reference_attention  # noqa: E402
from spikeprof.kernels.bench.__main__ import main  # noqa: E402
from spikeprof.kernels.bench.kv_precision import CHUNK, KINDS, compare, read_tokens, table_text  # noqa: E402
from spikeprof.kernels.cache import dequantise, quantise  # noqa: E402
from spikeprof.kernels.engine import Engine, ModelConfig  # noqa: E402
from spikeprof.kernels.engine.checkpoint import write_shard  # noqa: E402
from spikeprof.kernels.engine.weights import EMBEDDING, HEAD, NORM, layer_names, layer_shapes  # noqa: E402

CONFIG = ModelConfig(2, 64, 4, 2, 32, 128, 256)
TEXT = [(7 * at * at + 3 * at) % 256 for at in range(CHUNK + 21)]  # more than one chunk


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(CONFIG, weights="fp32", max_seq_len=len(TEXT) + 8, max_batch=1, device="cpu")


@pytest.fixture(scope="module")
def rows(engine: Engine):
    return {row.kind: row for row in compare(engine, TEXT)}


def test_bytes_by_hand(rows):
    # FP32 heads of 32: 128 bytes a side; 8 bits: 32 + 4; 4 bits: 16 + 4. Two layers with two heads each.
    assert {kind: row.bytes_per_token for kind, row in rows.items()} == {
        "fp16": 4 * 256, "int8-values": 4 * 164, "int8-keys": 4 * 164, "int8": 4 * 72, "int4": 4 * 40,
    }  # fmt: skip
    assert rows["int8-values"].saved_share == 1 - 164 / 256


def test_the_plain_cache_has_the_perplexity_of_the_model(engine: Engine, rows):
    """Against one pass over the whole text, each row of logits from a prefill of what stands before it."""
    loss = 0.0
    with engine.scope():
        for at in range(1, len(TEXT)):
            logits = engine.runner.prefill([at], [TEXT[:at]])
            engine.runner.cache.evict(at)
            loss -= float(torch.log_softmax(logits[0].double(), 0)[TEXT[at]])
    assert rows["fp16"].perplexity == pytest.approx(math.exp(loss / (len(TEXT) - 1)), rel=1e-5)
    assert rows["fp16"].perplexity_change_share == 0


@pytest.mark.parametrize(
    ("kind", "key_bits", "value_bits"), [("int8-values", 0, 8), ("int8-keys", 8, 0), ("int4", 4, 4)]
)
def test_the_error_of_attention_is_that_of_quantised_keys_and_values(engine: Engine, rows, kind, key_bits, value_bits):
    seen: dict[int, list[torch.Tensor]] = {}
    network = engine.runner.decoder.network
    hooks = [
        layer.attention.register_forward_pre_hook(
            lambda module, args: _wrap(seen, module.number, args), with_kwargs=False
        )
        for layer in network.layers
    ]
    try:
        with engine.scope():
            engine.runner.prefill([1], [TEXT[:-1]])
            engine.runner.cache.evict(1)
    finally:
        for hook in hooks:
            hook.remove()
    errors = []
    for q, k, v in seen.values():
        exact = reference_attention(q, k, v, causal=True).out
        keys = dequantise(quantise(k, key_bits)) if key_bits else k
        values = dequantise(quantise(v, value_bits)) if value_bits else v
        apart = reference_attention(q, keys, values, causal=True).out - exact
        # The first token is read by prefill, not from the cache.
        errors.append(float(apart[:, :, 1:].norm() / exact[:, :, 1:].norm()))
    assert rows[kind].attention_error == pytest.approx(sum(errors) / len(errors), rel=0.02)
    assert rows[kind].worst_layer_error == pytest.approx(max(errors), rel=0.02)


def _wrap(seen, number, args):
    x, step = args

    def attend(layer, q, k, v):
        seen[number] = [part.transpose(0, 1)[None] for part in (q, k, v)]
        return step.attend(layer, q, k, v)

    return x, step._replace(attend=attend)


def test_fewer_bits_cost_more(rows):
    assert rows["int4"].attention_error > 5 * rows["int8"].attention_error > 0
    assert rows["int8"].attention_error > max(rows["int8-keys"].attention_error, rows["int8-values"].attention_error)
    assert abs(rows["int8"].perplexity_change_share) < 0.01


def test_heads_that_have_no_four_bits_are_left_out():
    narrow = Engine(ModelConfig(1, 32, 2, 1, 16, 64, 64), weights="fp32", max_seq_len=32, max_batch=1, device="cpu")
    assert [row.kind for row in compare(narrow, [1, 2, 3])] == ["fp16", "int8-values", "int8-keys", "int8"]


@pytest.mark.parametrize(
    ("text", "why"), [([1], "has 1 tokens"), ([1, 256], "holds the id 256"), ([-1, 2], "the id -1")]
)
def test_texts_that_cannot_be_read(engine: Engine, text, why):
    with pytest.raises(ValueError, match=why):
        compare(engine, text)


def test_the_table_fits(rows):
    lines = table_text(list(rows.values()), "fp32").splitlines()
    assert max(map(len, lines)) <= 73
    assert lines[1].split() == ["fp32", "1,024", f"{rows['fp16'].perplexity:.3f}"]
    assert [line.split()[0] for line in lines[2:]] == list(KINDS)


@pytest.mark.parametrize("text", ["1 2 3", "[1, 2, 3]\n", "1,2,\n3 ", "1\n2\n3\n"])
def test_files_of_tokens(tmp_path: Path, text: str):
    (tmp_path / "tokens").write_text(text)
    assert read_tokens(tmp_path / "tokens") == [1, 2, 3]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"1 two 3", "'two' is no id of a token"),
        (b"1 -2", "'-2' is no id"),
        (b"17", "holds 1 ids"),
        (b"", "holds 0 ids"),
        (b"\xff\xfe1 2", "is no text"),
        (b"1 99999999999", "is no id"),
    ],
)
def test_files_that_hold_no_tokens(tmp_path: Path, data: bytes, why: str):
    (tmp_path / "tokens").write_bytes(data)
    with pytest.raises(ValueError, match=why):
        read_tokens(tmp_path / "tokens")


def test_a_checkpoint_and_a_text_on_the_command_line(tmp_path: Path, capsys):
    generator = torch.Generator().manual_seed(1)
    shapes = {EMBEDDING: (256, 64), NORM: (64,), HEAD: (256, 64)}
    sizes = {"q": 128, "k": 64, "v": 64}
    for layer in range(2):
        whole = layer_shapes(CONFIG)
        for field, names in layer_names(layer).items():
            for name in names:
                rows = sizes[name.split(".")[-2][0]] if field == "qkv" else whole[field][0] // len(names)
                shapes[name] = (rows, *whole[field][1:])
    tensors = {n: torch.randn(s, generator=generator) / 8 if len(s) == 2 else torch.ones(s) for n, s in shapes.items()}
    write_shard(tmp_path / "model.safetensors", tensors)
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokens").write_text(" ".join(map(str, TEXT[:40])))
    arguments = ["--ratios", "kv", "--quick", "--device", "cpu", "--json", "-", "--model", str(tmp_path)]
    assert main([*arguments, "--tokens", str(tmp_path / "tokens")]) == 0
    (row,) = json.loads(capsys.readouterr().out)["ratios"]
    assert row["how"].endswith("40 tokens of the file")
    assert row["figures"]["int8_bytes_per_token"] == 4 * 72
    assert row["figures"]["fp16_perplexity"] > 1
    assert main([*arguments, "--tokens", str(tmp_path / "absent")]) == 2
    assert "absent: cannot be read" in capsys.readouterr().err
