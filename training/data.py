"""Opens the texts of a run, computing the features that are missing."""

from collections.abc import Callable, Sequence
from pathlib import Path

from adaflash.engine.errors import ConfigError
from adaflash.engine.models.decoder import Decoder
from adaflash.engine.models.drafter_config import default_tap_layers
from adaflash.training.config import FitConfig
from adaflash.training.features import Text, TextStore, ensure_features
from adaflash.training.fit import Data
from adaflash.training.new_drafter import NUM_TAPS


def open_data(config: FitConfig, decoder: Decoder, say: Callable[[str], None]) -> Data:
    """Raises ConfigError if there is nothing to learn from or to judge by."""
    taps = taps_of(config, decoder)
    train, held_out = (
        open_texts([Path(folder) for folder in folders], decoder, taps, say)
        for folders in (config.data, config.held_out)
    )
    return Data(train, some_texts(held_out, config.evaluate_texts))


def taps_of(config: FitConfig, decoder: Decoder) -> tuple[int, ...]:
    """Layers of the target that the drafter reads."""
    taps = config.drafter.taps or default_tap_layers(decoder.config.num_layers, NUM_TAPS)
    return tuple(taps)


def some_texts(store: TextStore, count: int) -> list[Text]:
    """Evenly from the whole store."""
    every = max(1, len(store) // max(1, count))
    return [store.text(index) for index in range(0, len(store), every)][:count]


def open_texts(
    folders: Sequence[Path], decoder: Decoder, taps: tuple[int, ...], say: Callable[[str], None]
) -> TextStore:
    """Raises ConfigError if there are none."""
    for folder in folders:
        for done, total in ensure_features(folder, decoder, taps):
            if done % 10 == 0 or done == total:
                say(f"features of {folder.name}: {done} of {total} shards")
    store = TextStore(folders, taps)
    if not len(store):
        raise ConfigError(f"no texts in {', '.join(map(str, folders))}")
    return store
