"""Publish a folder on the Hub in one commit, checked before and verified after, and roll back to an earlier one.

transformers' own way uploads what it finds, in several commits, and a server error at the wrong moment leaves half of
them. Here a folder is first known to load, and all its files make one commit. It is retried when the Hub fails and
never made twice: every attempt names the commit that it builds on, and after a lost answer the branch is read before
anything else is done.
"""

import functools
import io
import json
import os
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, HfApi, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, logging

from ..models.text_batches import TARGET_TOKENIZER
from .card import CardFacts, make_card
from .client import first_line, full_repo_id, known_tokens, retry, status_code
from .folder import FileHash, check_folder, contains_token, hash_file, is_weight_file, replace_file
from .results import list_scores


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Publication:
    """What was published, or would be.

    Attributes:
        repo_id: The repository.
        commit: The commit that now holds the files; of a dry run the one that it would build on.
        uploaded: Files that are new or changed.
        deleted: Files that are gone: weights that the model no longer has.
        unchanged: Files that were there already.
        card: The model card that was written, or would be; `None` if the folder's README.md is kept.
        hub_error: Why a dry run could not read all of the Hub; `None` if it answered.
    """

    repo_id: str
    commit: str | None
    uploaded: tuple[str, ...]
    deleted: tuple[str, ...]
    unchanged: tuple[str, ...]
    card: str | None = None
    hub_error: str | None = None

    @property
    def trouble(self) -> str | None:
        """Old name of `hub_error`."""
        message = "`Publication.trouble` is now called `hub_error`; the old name will be removed in 0.3."
        warnings.warn(message, FutureWarning, stacklevel=2)
        return self.hub_error


def publish(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    revision: str = "main",
    tag: str | None = None,
    private: bool | None = None,
    commit_message: str = "Upload model",
    facts: CardFacts | None = None,
    results: dict[str, Any] | None = None,
    with_training_state: bool = False,
    dry_run: bool = False,
    token: str | None = None,
) -> Publication:
    """Publish a model's folder: check it, push one commit, verify what arrived.

    A folder without README.md gets a model card. The next call renews it unless somebody edits it; a card that was
    made with facts or results is renewed only by a call that gives one of them again.

    Calling this again resumes a push that was stopped: what the Hub has is not sent again, and no commit is made if
    nothing is left to do. When the Hub fails, the request is retried after as long as the Hub asks for; if that is
    more than five minutes, its error is raised at once. Where `hf_xet` is installed, weights go to a storage of their
    own, whose client retries for some minutes; `HF_HUB_DISABLE_XET=1` sends them without it.

    Args:
        folder (`str`): Folder with `config.json`, weights in safetensors, and mostly a tokenizer.
        repo_id (`str`): `"name"` or `"namespace/name"`; created if it does not exist.
        revision (`str`): The branch, which must exist unless it is `main`.
        tag (`str`, *optional*): Name for the commit, such as `"v1.0"`.
        private (`bool`, *optional*): Whether to create a private repository; by default the account's setting.
        commit_message (`str`): First line of the commit's message.
        facts (`CardFacts`, *optional*): For the model card: training data, limits, licence and the like.
        results (`dict[str, Any]`, *optional*): For the model card: content of a results file.
        with_training_state (`bool`): Whether to add optimizer, scheduler and random states, to resume from. They are
            pickles.
        dry_run (`bool`): Only find out what would be done. The Hub is read if it answers; nothing is changed, there
            or here.
        token (`str`, *optional*): The default is that of `hf auth login` or `HF_TOKEN`.

    Returns:
        `Publication`: the commit and its files.

    Raises:
        ValueError: if the folder is unfit, see [`check_folder`]; if there are facts or results for a card that
            somebody has edited; if there is no token, no such branch, or a model of another type on it; if somebody
            else pushed to it in the meantime; if what arrived is not what was sent; or if the tag names another
            commit.
        HfHubHTTPError: if the Hub refuses, or fails in every attempt.
        ConnectionError: if the storage of `hf_xet` fails.
    """
    root, names = Path(folder), check_folder(folder, with_training_state=with_training_state, token=token)
    api = HfApi(token=token)
    card_files = functools.partial(_card_files, root, facts=facts, results=results, token=token)
    if dry_run:
        return _preview(api, root, names, repo_id, revision, card_files, tag=tag, private=private)
    _check_token(token)
    repo_id = retry(lambda: full_repo_id(api, repo_id))
    written = card_files(repo_id)
    head, remote = retry(lambda: _state_before(api, repo_id, revision, private))
    hashes = _hash_files(root, names, written)
    _check_model_type(api, root, repo_id, head, remote, hashes)
    for name, content in written.items():
        replace_file(root / name, content)
    if head is None:
        _create_repo(api, repo_id, private)
        head, remote = retry(lambda: _head_and_files(api, repo_id, revision))
    plan = _plan(repo_id, head, hashes, remote, written)
    _check_tag(api, plan, tag)
    done = _commit_and_verify(api, plan, root, hashes, revision, commit_message)
    if tag is not None:
        _tag(api, repo_id, str(done.commit), tag)
    return done


def commit_folder(
    api: HfApi,
    repo_id: str,
    folder: str | os.PathLike[str],
    names: Iterable[str],
    *,
    revision: str = "main",
    commit_message: str,
) -> Publication:
    """Push checked files of a model's folder in one commit, and verify what arrived.

    Args:
        api (`HfApi`): The Hub's client.
        repo_id (`str`): The repository, `"namespace/name"`.
        folder (`str`): The folder.
        names (`Iterable[str]`): Names of the files, from [`check_folder`].
        revision (`str`): The branch.
        commit_message (`str`): First line of the commit's message.

    Returns:
        `Publication`: the commit and its files; the branch's last commit if it has these files already.

    Raises:
        ValueError: if there is a model of another type on the branch; if somebody else pushed to it in the meantime;
            or if what arrived is not what was sent.
        HfHubHTTPError: if the Hub refuses, or fails in every attempt.
        ConnectionError: if the storage of `hf_xet` fails.
    """
    root = Path(folder)
    head, remote = retry(lambda: _head_and_files(api, repo_id, revision))
    hashes = _hash_files(root, names, {})
    _check_model_type(api, root, repo_id, head, remote, hashes)
    plan = _plan(repo_id, head, hashes, remote, {})
    return _commit_and_verify(api, plan, root, hashes, revision, commit_message)


def roll_back(
    repo_id: str, to_revision: str, *, revision: str = "main", dry_run: bool = False, token: str | None = None
) -> Publication:
    """Restore the files of an earlier commit or tag on a branch, as one new commit. The history is kept.

    Args:
        repo_id (`str`): `"name"` or `"namespace/name"`.
        to_revision (`str`): Commit or tag whose files to restore.
        revision (`str`): The branch.
        dry_run (`bool`): Only find out what would be done.
        token (`str`, *optional*): The default is that of `hf auth login` or `HF_TOKEN`.

    Returns:
        `Publication`: the new commit, or the old one if it has these files already.

    Raises:
        ValueError: if there is no token or no such commit; if somebody else pushed to the branch in the meantime; or
            if the new commit has other files.
        HfHubHTTPError: if the Hub refuses, or fails in every attempt.
    """
    if not dry_run:
        _check_token(token)
    api = HfApi(token=token)
    repo_id = retry(lambda: full_repo_id(api, repo_id))
    head, now = retry(lambda: _head_and_files(api, repo_id, revision))
    try:
        source, wanted = retry(lambda: _head_and_files(api, repo_id, to_revision))
    except RevisionNotFoundError as error:
        tags = [each.name for each in retry(lambda: api.list_repo_refs(repo_id).tags)]
        raise ValueError(
            f"`to_revision` (--roll_back_to) must be a commit or a tag of {repo_id}, which has no {to_revision!r}; "
            f"its tags are {', '.join(tags) or 'none'}."
        ) from error
    changed = tuple(sorted(name for name in wanted if not wanted[name].matches(now.get(name))))
    deleted = tuple(sorted(now.keys() - wanted.keys()))
    plan = Publication(repo_id, head, changed, deleted, tuple(sorted(wanted.keys() - set(changed))))
    if dry_run or not (changed or deleted):
        return plan
    copies = [CommitOperationCopy(name, name, src_revision=source) for name in changed]
    commit = _commit_once(api, plan, copies, revision, f"Go back to {to_revision}", wanted)
    _verify(api, repo_id, commit, wanted)
    return replace(plan, commit=commit)


def _preview(
    api: HfApi,
    root: Path,
    names: list[str],
    repo_id: str,
    revision: str,
    card_files: Callable[[str], dict[str, bytes]],
    *,
    tag: str | None,
    private: bool | None,
) -> Publication:
    """Find out what would be published. A repository that can't be read counts as empty."""
    head: str | None = None
    remote: dict[str, FileHash] = {}
    hub_error: str | None = None
    try:
        repo_id = full_repo_id(api, repo_id)
        head, remote = _state_before(api, repo_id, revision, private)
    except (OSError, HTTPError) as error:
        hub_error = first_line(error)
    written = card_files(repo_id)
    hashes = _hash_files(root, names, written)
    plan = _plan(repo_id, head, hashes, remote, written)
    checks = (lambda: _check_model_type(api, root, repo_id, head, remote, hashes), lambda: _check_tag(api, plan, tag))
    for check in checks:
        try:
            check()
        except (OSError, HTTPError) as error:
            hub_error = first_line(error)
    return replace(plan, hub_error=hub_error)


def _check_token(token: str | None) -> None:
    """Raise if there is no token, without which nothing can be pushed."""
    if not known_tokens(token):
        raise ValueError("There is no token for the Hub. Log in with `hf auth login`, or set HF_TOKEN.")


def _card_files(
    folder: Path, repo_id: str, facts: CardFacts | None, results: dict[str, Any] | None, token: str | None
) -> dict[str, bytes]:
    """Make the card and its picture as far as they differ from the folder's; nothing is written."""
    made = make_card(folder, repo_id, facts, results)
    path = folder / "README.md"
    if made is None:
        if facts not in (None, CardFacts()) or results is not None:
            raise ValueError(
                f"{path} was written or edited by hand, and `facts` or `results` would replace it. Remove it to have "
                "it written again, or leave these out."
            )
        if repo_id not in path.read_text(encoding="utf-8", errors="replace"):
            logger.warning(f"{path} is kept as it is, but does not name {repo_id}: does it belong to this model?")
        return {}
    if contains_token(io.BytesIO(made["README.md"]), known_tokens(token)):
        raise ValueError("The model card would contain a token of the Hub; remove it from `facts` or `results`.")
    if results is not None and not list_scores(results):
        raise ValueError("`results` must have scores, as the results files of the scripts do; found none.")
    there = {name: (folder / name).read_bytes() for name in made if (folder / name).is_file()}
    return {name: content for name, content in made.items() if there.get(name) != content}


def _check_model_type(
    api: HfApi, folder: Path, repo_id: str, head: str | None, remote: dict[str, FileHash], hashes: dict[str, FileHash]
) -> None:
    """Raise if the repository has a model of another type, whose files would be mixed with the new ones."""
    if (_is_adapter(hashes) and CONFIG_NAME in remote) or (_is_adapter(remote) and CONFIG_NAME in hashes):
        kinds = ("an adapter", "a model") if _is_adapter(hashes) else ("a model", "an adapter")
        raise ValueError(
            f"`repo_id` {repo_id} has {kinds[1]}, whose weights would be deleted, and {folder} is {kinds[0]}. Give "
            "another repository."
        )
    if CONFIG_NAME not in remote or CONFIG_NAME not in hashes:
        return
    if hashes[CONFIG_NAME].matches(remote[CONFIG_NAME]):
        return
    there = retry(lambda: hf_hub_download(repo_id, CONFIG_NAME, revision=head, token=api.token))
    theirs, ours = _model_type(Path(there)), _model_type(folder / CONFIG_NAME)
    if theirs not in (None, ours):
        raise ValueError(
            f"`repo_id` {repo_id} has a model of type {theirs}, and {folder} one of type {ours}: the files of both "
            "would be mixed. Give another repository."
        )


def _is_adapter(names: Collection[str]) -> bool:
    """Tell whether files are those of an adapter of PEFT alone."""
    return CONFIG_NAME not in names and ADAPTER_CONFIG_NAME in names


def _model_type(path: Path) -> str | None:
    """Read the type of a model from a config.json; `None` if it has none."""
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError):
        return None


def _hash_files(folder: Path, names: Iterable[str], written: dict[str, bytes]) -> dict[str, FileHash]:
    """Hash the files of a folder, and those about to be written there."""
    hashes = {name: hash_file(io.BytesIO(content)) for name, content in written.items()}
    for name in names:
        if name not in written:
            with (folder / name).open("rb") as file:
                hashes[name] = hash_file(file)
    return dict(sorted(hashes.items()))


def _state_before(
    api: HfApi, repo_id: str, revision: str, private: bool | None
) -> tuple[str | None, dict[str, FileHash]]:
    """Return the head and files of a branch, or nothing if the repository does not exist yet."""
    try:
        state = _head_and_files(api, repo_id, revision)
    except HfHubHTTPError as error:
        if status_code(error) != 404:
            raise
        if isinstance(error, RevisionNotFoundError) or revision != "main":
            raise ValueError(
                f"`revision` must be a branch of {repo_id}, which has no {revision!r}. Create it with "
                "`HfApi.create_branch`, or publish on main."
            ) from error
        return None, {}
    if private:
        logger.warning(f"{repo_id} exists already, so `private` has no effect; change it in its settings on the Hub.")
    return state


def _create_repo(api: HfApi, repo_id: str, private: bool | None) -> None:
    """Create a repository, unless it exists by now, for example after a lost answer."""

    def attempt() -> None:
        try:
            api.create_repo(repo_id, private=private)
        except HfHubHTTPError as error:
            if status_code(error) != 409 or not api.repo_exists(repo_id):
                raise

    retry(attempt, also=(409,))  # also the answer while another repository of the account is being created


def _head_and_files(api: HfApi, repo_id: str, revision: str) -> tuple[str | None, dict[str, FileHash]]:
    """Return the commit that a branch points to, and its files."""
    head = api.repo_info(repo_id, revision=revision).sha
    entries = list(api.list_repo_tree(repo_id, recursive=True, revision=head))
    files = [entry for entry in entries if isinstance(entry, RepoFile)]
    return head, {
        file.path: FileHash(file.lfs.sha256, None) if file.lfs else FileHash(None, file.blob_id) for file in files
    }


def _plan(
    repo_id: str,
    head: str | None,
    hashes: dict[str, FileHash],
    remote: dict[str, FileHash],
    written: dict[str, bytes],
) -> Publication:
    """Compare a folder with a branch.

    Old weights and tokenizers of targets are deleted, since they would be loaded with the new model.
    """
    uploaded = tuple(name for name in hashes if not hashes[name].matches(remote.get(name)))
    models = {Path(name).parent for name in hashes if Path(name).name == CONFIG_NAME} | {Path()}
    targets = {model / TARGET_TOKENIZER for model in models}
    loaded = [
        name
        for name in remote
        if (is_weight_file(name) and Path(name).parent in models) or Path(name).parent in targets
    ]
    deleted = tuple(sorted(name for name in loaded if name not in hashes))
    unchanged = tuple(name for name in hashes if name not in uploaded)
    card = written["README.md"].decode() if "README.md" in written else None
    return Publication(repo_id, head, uploaded, deleted, unchanged, card)


def _commit_and_verify(
    api: HfApi, plan: Publication, root: Path, hashes: dict[str, FileHash], revision: str, message: str
) -> Publication:
    """Make the planned commit if anything differs, and verify the branch's files."""
    commit = str(plan.commit)
    if plan.uploaded or plan.deleted:
        additions = [CommitOperationAdd(name, root / name) for name in plan.uploaded]
        commit = _commit_once(api, plan, additions, revision, message, hashes)
    _verify(api, plan.repo_id, commit, hashes)
    return replace(plan, commit=commit)


def _commit_once(
    api: HfApi, plan: Publication, additions: list[Any], revision: str, message: str, wanted: dict[str, FileHash]
) -> str:
    """Make one commit on top of `plan.commit`, however often the Hub fails.

    The Hub refuses a commit whose parent is no longer the head, so a second attempt can't make a second commit. If an
    answer was lost, the head has moved, and its files show whether the commit is ours.
    """
    deletions = [CommitOperationDelete(name) for name in plan.deleted]

    def attempt() -> str:
        head, remote = _head_and_files(api, plan.repo_id, revision)
        if head != plan.commit:
            arrived = all(wanted[name].matches(remote.get(name)) for name in plan.uploaded)
            if arrived and not any(name in remote for name in plan.deleted):
                return str(head)
            raise ValueError(
                f"Somebody else pushed to {plan.repo_id} ({revision}) in the meantime: it was at {plan.commit} and is "
                f"at {head}. Look at what they did, and publish again."
            )
        info = api.create_commit(
            plan.repo_id,
            [*additions, *deletions],
            commit_message=message,
            revision=revision,
            parent_commit=plan.commit,
        )
        return str(info.oid)

    # The branch has moved (412) or is being changed (409): the next attempt finds out by whom.
    return retry(attempt, also=(409, 412))


def _check_tag(api: HfApi, plan: Publication, tag: str | None) -> None:
    """Raise before anything is done if a tag exists elsewhere."""
    if tag is None or plan.commit is None:
        return
    tags = {each.name: each.target_commit for each in retry(lambda: api.list_repo_refs(plan.repo_id).tags)}
    if tag in tags and (tags[tag] != plan.commit or plan.uploaded or plan.deleted):
        raise ValueError(f"`tag` {tag!r} names the commit {tags[tag]} of {plan.repo_id} already; give another one.")


def _tag(api: HfApi, repo_id: str, commit: str, tag: str) -> None:
    """Tag a commit, unless it has this tag by now, for example after a lost answer."""
    try:
        retry(lambda: api.create_tag(repo_id, tag=tag, revision=commit))
    except HfHubHTTPError as error:
        named = retry(lambda: api.repo_info(repo_id, revision=tag).sha) if status_code(error) == 409 else None
        if named != commit:
            raise


def _verify(api: HfApi, repo_id: str, commit: str, hashes: dict[str, FileHash]) -> None:
    """Raise unless the commit has these files."""
    _, remote = retry(lambda: _head_and_files(api, repo_id, commit))
    different = sorted(name for name in hashes if not hashes[name].matches(remote.get(name)))
    if different:
        raise ValueError(
            f"{repo_id} at {commit} is not what was sent: {', '.join(different[:3])} differ. Publish again, or "
            "restore an earlier commit with `roll_back`."
        )
