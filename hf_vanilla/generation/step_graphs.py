"""CUDA graphs for the steps of a beam search: a GPU starts a step at one command in place of hundreds.

```
                  tokens, parents of the beams
                                |  copied
    one step of the decoder on buffers of fixed sizes, captured once, replayed at every later step
        sentences x beams x slots, each rounded up: few sizes, so few graphs
                                |
                  logits, of which the search reads the rows of its sentences
```

A graph runs the same kernels on the same memory again. So a step reads and writes buffers alone, counts in tensors,
and asks for no value. What is prepared between steps, when sentences leave or slots run out, is computed as always and
then copied into the buffers.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache

from ..models.checks import check_integer
from .beam_decoders import SideBySideDecoder


# Steps that run before one is captured, in which libraries allocate what they need.
WARM_UP_STEPS = 2
# Sizes are multiples of this, and have this many values between a power of two and the next.
LEAST_SIZE = 8
SIZES_PER_DOUBLING = 4


class StepGraphs:
    """The captured steps of one model, kept from one search to the next: `beam_search`'s argument `step_graphs`.

    ```python
    graphs = StepGraphs()
    model.generate(**inputs, num_beams=4, custom_generate=beam_search, step_graphs=graphs)
    ```

    Each combination of sizes (sentences, beams, slots, source length, each rounded up) is captured when it first
    occurs, which takes as long as some steps, and keeps its buffers on the GPU until this object is deleted, or
    `max_graphs` others were used since. Graphs of weights that have been replaced or moved since are captured again.
    One search at a time may use it.

    Args:
        max_graphs (`int`, defaults to 64): How many are kept.

    Raises:
        ValueError: if it is below 1.
        TypeError: if it is no integer.
    """

    def __init__(self, max_graphs: int = 64) -> None:
        check_integer("max_graphs", max_graphs)
        self.max_graphs = max_graphs
        self._graphs: OrderedDict[tuple, StepGraph] = OrderedDict()  # the one used last at the end
        self._addresses: tuple[int, ...] = ()
        self._place: Any = None

    def __len__(self) -> int:
        """Return the number of captured steps."""
        return len(self._graphs)

    def check(self, device: torch.device) -> None:
        """Check that steps on a device can be captured.

        Args:
            device (`torch.device`): The device.

        Raises:
            ValueError: if it is no CUDA device.
        """
        CapturedStep.check(device)

    def wrap(self, decoder: SideBySideDecoder) -> "GraphedDecoder":
        """Return a decoder that replays steps where this one computes them.

        Args:
            decoder (`SideBySideDecoder`): The decoder of a search that has not started.

        Returns:
            `GraphedDecoder`: the decoder for the search.
        """
        modules = (decoder.decoder, decoder.lm_head)
        tensors = (each for module in modules for each in (*module.parameters(), *module.buffers()))
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        if addresses != self._addresses:
            self._graphs.clear()
            self._addresses, self._place = addresses, CapturedStep.new_place(decoder.mask.device)
        return GraphedDecoder(decoder, self)

    def graph_of(self, decoder: SideBySideDecoder) -> "StepGraph":
        """Return the captured step for the sizes of a decoder's state, captured now if it is new.

        Args:
            decoder (`SideBySideDecoder`): A decoder that has read the prompt.

        Returns:
            `StepGraph`: the step, with the decoder's state in its buffers.
        """
        state, device = decoder.state(), decoder.mask.device
        shapes = {name: _buffer_shape(name, tensor.shape) for name, tensor in state.items()}
        key = (
            device,
            tuple(shapes.values()),
            tuple(tensor.dtype for tensor in state.values()),
            decoder.decoder.training,
            decoder.decoder.config._attn_implementation,
            torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
            _adapters_in_use(decoder.decoder, decoder.lm_head),
        )
        if key not in self._graphs:
            self._graphs[key] = StepGraph(decoder, shapes, self._place)
        self._graphs.move_to_end(key)
        if len(self._graphs) > self.max_graphs:
            self._graphs.popitem(last=False)
        self._graphs[key].load(decoder)
        return self._graphs[key]


class GraphedDecoder:
    """A decoder of a beam search that replays captured steps.

    Args:
        decoder (`SideBySideDecoder`): The decoder that reads the prompt, and does what is between steps.
        graphs (`StepGraphs`): The captured steps.
    """

    can_drop = True
    past_key_values: Cache | None = None

    def __init__(self, decoder: SideBySideDecoder, graphs: StepGraphs):
        self.decoder, self.graphs = decoder, graphs
        self.graph: StepGraph | None = None
        self.recorded: dict[str, tuple] = {}

    def start(self) -> torch.Tensor:
        """Process the prompt, once for all beams of a sentence.

        Returns:
            `torch.Tensor` of shape `(batch, 1, vocab)`: the logits of the first token.
        """
        return self.decoder.start()

    def step(self, sequences: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """Process the last token of each beam.

        Args:
            sequences (`torch.LongTensor` of shape `(batch, num_beams, tgt_len)`): The beams.
            parents (`torch.LongTensor` of shape `(batch, num_beams)`): The beam of the previous step that each
                continues.

        Returns:
            `torch.Tensor` of shape `(batch, num_beams, vocab)`: the logits of the next token, until the next step.
        """
        if self.graph is None or self.decoder.is_full:
            self.decoder.make_room(parents)
            self.graph = self.graphs.graph_of(self.decoder)
            parents = torch.arange(parents.shape[1], device=parents.device)  # the mask is in their order now
        self.decoder.advance()
        return self.graph.run(sequences[..., -1], parents)

    def keep(self, sentences: torch.Tensor) -> None:
        """Drop all sentences except these.

        Args:
            sentences (`torch.LongTensor`): Their indices in the current batch.
        """
        self.decoder.keep(sentences)


class StepGraph:
    """One step of a decoder on buffers of fixed sizes, captured.

    Args:
        decoder (`SideBySideDecoder`): The decoder, whose weights the step reads.
        shapes (`dict[str, tuple[int, ...]]`): Shapes of the buffers for what its `state` gives.
        place (`Any`): Where captured steps run, none of them beside another, from `CapturedStep.new_place`.
    """

    def __init__(self, decoder: SideBySideDecoder, shapes: dict[str, tuple[int, ...]], place: Any):
        state, device = decoder.state(), decoder.mask.device
        batch, num_beams, _ = shapes["mask"]
        with torch.inference_mode(False):  # such buffers may be written in and out of it
            self.buffers = {
                name: torch.empty(shape, dtype=state[name].dtype, device=device) for name, shape in shapes.items()
            }
            self.tokens, self.parents = torch.zeros(2, batch, num_beams, dtype=torch.long, device=device)
            self.slots = torch.zeros(num_beams, dtype=torch.long, device=device)
            self.sentences = torch.arange(batch, device=device)[:, None]
        self.decoder = decoder.on_buffers(self.buffers, self.slots)
        self.logits: torch.Tensor
        self.captured = CapturedStep(self._clear, self._step, device, place)

    def load(self, decoder: SideBySideDecoder) -> None:
        """Copy a decoder's state into the buffers, and have it use them for what a step writes.

        Args:
            decoder (`SideBySideDecoder`): The decoder.
        """
        self._clear()
        for name, tensor in decoder.state().items():
            self.buffers[name][tuple(map(slice, tensor.shape))] = tensor
        torch.arange(decoder.used, decoder.used + decoder.num_beams, out=self.slots)
        self.batch = len(decoder.mask)
        decoder.mask, decoder.capacity = self.buffers["mask"][: self.batch], self.buffers["mask"].shape[2]
        for layer, fixed in zip(decoder.slot_layers, self.decoder.slot_layers, strict=True):
            layer.keys, layer.values = fixed.keys[: self.batch], fixed.values[: self.batch]

    def run(self, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """Replay the step.

        Args:
            tokens (`torch.LongTensor` of shape `(batch, num_beams)`): The last token of each beam.
            parents (`torch.LongTensor` of shape `(batch or 1, num_beams)`): The beam that each continues.

        Returns:
            `torch.Tensor` of shape `(batch, num_beams, vocab)`: the logits of the next token, until the next step.
        """
        self.tokens[: self.batch], self.parents[: self.batch] = tokens, parents
        self.captured.run()
        return self.logits[: self.batch]

    def _clear(self) -> None:
        """Empty the buffers: a sentence that is not there sees nothing, at the position before the first."""
        for name, buffer in self.buffers.items():
            empty = 0 if buffer.dtype == torch.bool else torch.finfo(self.decoder.mask.dtype).min
            buffer.fill_(empty if name.endswith("mask") else -1 if name == "position_ids" else 0)
        torch.arange(len(self.slots), out=self.slots)

    def _step(self) -> None:
        """Run one step on the buffers alone."""
        decoder = self.decoder
        decoder.mask.copy_(decoder.mask[self.sentences, self.parents])
        decoder.mask.index_copy_(2, self.slots, decoder.own_slot.expand(len(decoder.mask), -1, -1))
        decoder.position_ids.add_(1)
        self.logits = decoder.logits_of(self.tokens)
        self.slots.add_(len(self.slots))


class Place(NamedTuple):
    """The stream on which steps are captured, not the default one, and the memory that their graphs share."""

    stream: torch.cuda.Stream
    memory: Any


class CapturedStep:
    """What a function starts on a CUDA device, captured as a graph.

    Args:
        prepare (`Callable`): Is called before each of the function's calls here.
        step (`Callable`): The function.
        device (`torch.device`): The device.
        place (`Place`): Where, from `new_place`.
    """

    def __init__(self, prepare: Callable[[], None], step: Callable[[], None], device: torch.device, place: Place):
        stream = place.stream
        # What a search in inference mode captures, one out of it may replay, and write into its logits.
        with torch.cuda.device(device), torch.inference_mode(False), torch.no_grad(), without_autocast_cache():
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP_STEPS):
                    prepare()
                    step()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            # by thread: another may pin memory for batches meanwhile
            with torch.cuda.graph(self.graph, pool=place.memory, stream=stream, capture_error_mode="thread_local"):
                step()

    @staticmethod
    def check(device: torch.device) -> None:
        """Check that steps on a device can be captured.

        Args:
            device (`torch.device`): The device.

        Raises:
            ValueError: if it is no CUDA device.
        """
        if device.type != "cuda":
            raise ValueError(f"`step_graphs` needs a model on a CUDA device, got one on {device}; leave it out.")

    @staticmethod
    def new_place(device: torch.device) -> Place:
        """Return a stream of a device, and memory for graphs that share it.

        Args:
            device (`torch.device`): The device.

        Returns:
            `Place`: both.
        """
        with torch.cuda.device(device):
            return Place(torch.cuda.Stream(), torch.cuda.graph_pool_handle())

    def run(self) -> None:
        """Start it again."""
        self.graph.replay()


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Have autocast convert weights anew: a graph would keep the addresses of converted ones, which are freed later.

    Yields:
        Nothing.
    """
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


def _adapters_in_use(*modules: torch.nn.Module) -> tuple:
    """Return what PEFT's adapters compute now: they are switched, and merged, without other tensors."""
    layers: list[Any] = [
        layer for module in modules for layer in module.modules() if hasattr(layer, "merged_adapters")
    ]
    return tuple(
        (*layer.active_adapters, "merged", *layer.merged_adapters, layer.disable_adapters) for layer in layers
    )


def _buffer_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Round up the numbers of sentences and of keys, of positions those of sentences alone."""
    keys = (-1 if name.endswith("mask") else -2) % len(shape)
    return tuple(_rounded_up(size) if dim in (0, keys) else size for dim, size in enumerate(shape))


def _rounded_up(size: int) -> int:
    """Round up to one of few sizes."""
    step = max(LEAST_SIZE, 2 ** (size - 1).bit_length() // (2 * SIZES_PER_DOUBLING))
    return -(-size // step) * step


__all__ = ["StepGraphs"]
