#!/usr/bin/env python
r"""Update the model cards of this repository's recipes after a result or a fact has changed.

    python scripts/write_model_cards.py

Reads model_cards/facts.json, which has an entry for each card, and model_cards/results/*.json, and writes
model_cards/*.md. A card shows the picture of the same name, which `hf_vanilla.hub.card.draw_curve` draws from a
training's folder.
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("write_model_cards")

import sys
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.data.files import read_json_object, replacing_file
from hf_vanilla.hub.card import CardFacts, model_card


@dataclass
class CardsArguments:
    """Where the cards are."""

    folder: str = field(default="model_cards", metadata={"help": "Folder with facts.json and results."})
    namespace: str | None = field(
        default=None,
        metadata={"help": "Account on the Hub for the models; by default the cards name none."},
    )


def make_card(folder: Path, name: str, repo_id: str, entry: dict) -> str:
    """Make the card of one recipe, with the picture of its training if there is one."""
    results = read_json_object(folder / "results" / entry["results"])
    card = model_card(
        CardFacts(**entry["facts"]),
        repo_id,
        model_type=entry["model_type"],
        auto_class=entry["auto_class"],
        results=results,
        curve=f"{name}.png" if (folder / f"{name}.png").is_file() else None,
        recipe=Path(entry["results"]).stem,
    )
    return str(card)


def main() -> None:
    """Write every card."""
    (arguments,) = parse_arguments(CardsArguments, description=__doc__)
    if arguments.namespace:
        try:
            validate_repo_id(f"{arguments.namespace}/name")
        except HFValidationError:
            raise ValueError(f"`namespace` must be an account on the Hub, got {arguments.namespace!r}.") from None
    folder = Path(arguments.folder)
    facts = folder / "facts.json"
    if not facts.is_file():
        raise ValueError(f"`folder` must have facts.json, as model_cards of the repository has; got {folder}.")
    for name, entry in read_json_object(facts).items():
        with replacing_file(str(folder / f"{name}.md")) as file:
            repo_id = f"{arguments.namespace}/{name}" if arguments.namespace else name
            file.write(make_card(folder, name, repo_id, entry))


if __name__ == "__main__":
    sys.exit(run(main))
