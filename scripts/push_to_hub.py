#!/usr/bin/env python
r"""Publish a model's folder on the Hub: checked before, one commit, verified after.

    python scripts/push_to_hub.py --folder runs/bert --repo_id my-name/my-bert --dry_run    # what would go
    python scripts/push_to_hub.py --folder runs/bert --repo_id my-name/my-bert --tag v1.0

Log in first: `hf auth login`, or set HF_TOKEN. The folder must load, model and tokenizer must fit, and it must
contain no pickle and no token; checkpoints, optimizer states and the like are not sent. If the push is stopped, run
the same command again: it sends only what is missing. If it fails at the storage of weights, whose address contains
"xet", HF_HUB_DISABLE_XET=1 sends them another way.

A folder without README.md gets a model card, and --dry_run shows it. It gives what the folder contains: scores, size,
length of the training. The next push renews it, unless you edit it. --results takes the scores from a script's
results file, and --card adds what no file contains; a card made with either is renewed only by a push that gives one
of them again. --card is a JSON file like this one; each field is optional:

    {"title": "English to German captions", "language": ["en", "de"], "license": "apache-2.0",
     "datasets": ["bentrevett/multi30k"], "training_data": "29,000 pairs of captions of photographs.",
     "limits": "It translates captions only.", "example": "A dog runs."}

`example` is a text to try the model with. Further fields: "license_name" if the license is "other", "base_model" for a
fine-tuned model.

To go back to an earlier commit, as one new commit:

    python scripts/push_to_hub.py --repo_id my-name/my-bert --roll_back_to v0.9
"""

from hf_vanilla_cli import answer_early


if __name__ == "__main__":  # before the slow imports
    answer_early("push_to_hub")

import dataclasses
import sys
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import constants

from hf_vanilla import publish, roll_back
from hf_vanilla.command_line.checks import check_files_exist
from hf_vanilla.command_line.options import parse_arguments, run
from hf_vanilla.data.files import read_json_object
from hf_vanilla.hub.card import CardFacts, missing_facts


@dataclass
class PushArguments:
    """What to publish, and where."""

    repo_id: str = field(
        metadata={"help": "Repository on the Hub, such as my-name/my-model; created if it does not exist."}
    )
    folder: str | None = field(default=None, metadata={"help": "Folder of the model."})
    revision: str = field(default="main", metadata={"help": "Branch to publish on."})
    tag: str | None = field(default=None, metadata={"help": "Name for the commit, such as v1.0."})
    private: bool | None = field(default=None, metadata={"help": "Create a private repository."})
    commit_message: str = field(default="Upload model", metadata={"help": "First line of the commit's message."})
    card: str | None = field(
        default=None,
        metadata={
            "help": "JSON file for the model card, with title, language, license, license_name, datasets, "
            "training_data, limits, example, base_model, or some of them; see the example above."
        },
    )
    results: str | None = field(default=None, metadata={"help": "JSON file of results for the model card."})
    with_training_state: bool = field(
        default=False, metadata={"help": "Publish optimizer, scheduler and random states too, to resume from."}
    )
    dry_run: bool = field(default=False, metadata={"help": "Only list what would be done, and show the model card."})
    roll_back_to: str | None = field(
        default=None, metadata={"help": "Publish nothing, go back to this commit or tag."}
    )

    def __post_init__(self):
        if (self.folder is None) == (self.roll_back_to is None):
            given = "neither" if self.folder is None else "both"
            raise ValueError(f"Pass `folder` to publish, or `roll_back_to` to go back; got {given}.")
        for name in ("tag", "private", "commit_message", "card", "results", "with_training_state"):
            if self.roll_back_to is not None and getattr(self, name) not in (
                None,
                False,
                PushArguments.commit_message,
            ):
                raise ValueError(f"`{name}` has no effect with `roll_back_to`; leave it out.")


def read_facts(arguments: PushArguments) -> tuple[CardFacts | None, dict[str, Any] | None]:
    """Read the facts and results for the model card."""
    check_files_exist(card=arguments.card, results=arguments.results)
    facts, results = (
        None if path is None else read_json_object(path, name)
        for name, path in (("card", arguments.card), ("results", arguments.results))
    )
    if facts is None:
        return None, results
    known = [each.name for each in dataclasses.fields(CardFacts)]
    for name in facts:
        if name not in known:
            raise ValueError(f"`card` must have the fields {', '.join(known)}; got {name!r}.")
    return CardFacts(**facts), results


def main() -> None:
    """Publish or go back, and print what was done."""
    (arguments,) = parse_arguments(PushArguments, description=__doc__)
    missing: list[str] = []
    if arguments.roll_back_to is not None:
        done = roll_back(
            arguments.repo_id, arguments.roll_back_to, revision=arguments.revision, dry_run=arguments.dry_run
        )
    else:
        facts, results = read_facts(arguments)
        missing = missing_facts(facts)
        done = publish(
            arguments.folder,
            arguments.repo_id,
            revision=arguments.revision,
            tag=arguments.tag,
            private=arguments.private,
            commit_message=arguments.commit_message,
            facts=facts,
            results=results,
            with_training_state=arguments.with_training_state,
            dry_run=arguments.dry_run,
        )
    print("+ new or changed, - deleted, = there already")
    for sign, names in (("+", done.uploaded), ("-", done.deleted), ("=", done.unchanged)):
        for name in names:
            print(f"{sign} {name}")
    if arguments.dry_run:
        if done.card is not None:
            print(f"README.md would be:\n\n{done.card}")
            if missing:
                print(f"The card lacks {', '.join(missing)}; add them with --card, see --help.")
        if done.hub_error is not None:
            print(f"The Hub could not be read completely: {done.hub_error}")
        print(f"Nothing was done: this is what would change in {done.repo_id} ({arguments.revision}).")
    else:
        print(f"{constants.ENDPOINT}/{done.repo_id} ({arguments.revision}) is at {done.commit}.")


if __name__ == "__main__":
    sys.exit(run(main))
