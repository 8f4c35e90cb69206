"""A small model in FP16 of which one layer overflows after some steps: Inf there, NaN in all that follows.

    spikeprof run --numerics -- python examples/overflow_demo.py
    spikeprof run --numerics -- python examples/overflow_demo.py --layer 3 --step 20 --mode graph
    python examples/overflow_demo.py --dtype bf16

The model is fed what it gives, as a decoder is. One channel of its residual stream grows by a quarter with each step,
as outlier channels of real models do over long texts; one layer passes that channel on to a squared ReLU, whose result
does not fit into FP16 from step ``--step`` on. BF16 and FP32 hold it.

Standard output gets one line: in which steps the output was finite.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

HIDDEN, INTERMEDIATE, TOKENS = 64, 256, 16
GROWTH = 1.25  # of the outlier, from step to step
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class SquaredReLU(nn.Module):
    """relu(x)²."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return torch.relu(x).square()


class Mlp(nn.Module):
    """Up, squared ReLU, down; with ``sees_outlier`` the first intermediate channel is the stream's first."""

    def __init__(self, sees_outlier: bool) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.activation = SquaredReLU()
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)
        with torch.no_grad():
            self.up.weight[:, 0] = 0  # the outlier changes nothing ...
            if sees_outlier:
                self.up.weight[0] = 0
                self.up.weight[0, 0] = 1  # ... but here
            self.down.weight[:, 0] *= 1e-4
            self.down.weight[0] = 0

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> the same."""
        return self.down(self.activation(self.up(x)))


class Layer(nn.Module):
    """The MLP beside the residual stream, and a norm of all but the outlier."""

    def __init__(self, sees_outlier: bool) -> None:
        super().__init__()
        self.mlp = Mlp(sees_outlier)
        self.norm = nn.LayerNorm(HIDDEN - 1)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> the same."""
        x = x + self.mlp(x)
        return torch.cat([x[:, :1], self.norm(x[:, 1:])], 1)


class Model(nn.Module):
    """Layers, one of which sees the outlier."""

    def __init__(self, layers: int, bad_layer: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(number == bad_layer) for number in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> the same."""
        for layer in self.layers:
            x = layer(x)
        return x


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; ends the program with code 2 for values that cannot work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="layers (8)")
    parser.add_argument("--layer", type=int, default=5, help="the one that overflows, from 0 (5)")
    parser.add_argument("--steps", type=int, default=32, help="steps to run (32)")
    parser.add_argument("--step", type=int, default=24, help="the first in which it overflows, from 0 (24)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp16", help="of weights and activations (fp16)")
    parser.add_argument("--mode", choices=("eager", "graph"), default="eager", help="graph: replays of a CUDA graph")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    options = parser.parse_args(arguments)
    if not 0 <= options.layer < options.layers:
        parser.error(f"--layer must be from 0 to {options.layers - 1}")
    if not 1 <= options.step <= 50 or options.steps < 1:
        parser.error("--step must be from 1 to 50, --steps at least 1")
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.mode == "graph" and options.device != "cuda":
        parser.error("--mode graph needs a CUDA device")
    return options


def stepper(model: Model, x: Tensor, growth: Tensor, mode: str) -> Callable[[], None]:
    """A function that runs a step on ``x`` in place."""

    def step() -> None:
        x.copy_(model(x) * growth)

    if mode == "eager":
        return step
    before = x.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # what is made at the first call must not be captured
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    x.copy_(before)
    return graph.replay


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> int:
    """Run the steps, and print which of them were sound."""
    options = parsed(arguments)
    torch.manual_seed(0)
    place = {"device": options.device, "dtype": DTYPES[options.dtype]}
    model = Model(options.layers, options.layer).to(**place).eval()
    x = torch.randn(TOKENS, HIDDEN).to(**place)
    # 256² = 65536 does not fit: half a step before it, in bits, at the step before; half a step beyond at the step.
    x[:, 0] = 256 * GROWTH ** (0.5 - options.step)
    growth = torch.ones(HIDDEN, **place)  # held here: a graph reads it at each replay
    growth[0] = GROWTH
    step = stepper(model, x, growth, options.mode)
    finite = []
    for _ in range(options.steps):
        step()
        finite.append(bool(x.isfinite().all()))
    bad = [number for number, sound in enumerate(finite) if not sound]
    print(f"{len(finite) - len(bad)} of {len(finite)} steps finite" + (f", the first bad one {bad[0]}" if bad else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
