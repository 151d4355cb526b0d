"""Publish a folder on the Hub in one commit that is checked before and verified after, and take it back if need be.

transformers' own way uploads what it finds, in several commits, and an error of the server at the wrong moment leaves
half of them. Here nothing goes before the folder is known to load; all that goes is one commit; it is tried again when
the Hub fails, and never made twice: every attempt names the commit that it builds on, and after a lost answer the
branch is read before anything else is done.
"""

import functools
import hashlib
import io
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, HfApi, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from transformers.utils import logging

from .card import CURVE, CardFacts, card_of_folder, draw_curve, sign_card, stays
from .client import _first_line, retry, status_of
from .folder import _CHUNK, WEIGHT_FILES, _has_token, _matches, _secrets, _whole_name, check_folder


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
        card: The model card that was written, or would be; none if the folder's README.md stays as it is.
        trouble: Why a dry run could not ask the Hub everything; none if it answered.
    """

    repo_id: str
    commit: str | None
    uploaded: tuple[str, ...]
    deleted: tuple[str, ...]
    unchanged: tuple[str, ...]
    card: str | None = None
    trouble: str | None = None


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

    A folder without README.md gets a model card. The next call renews it, as long as nobody edits it; a card that was
    made with facts or results is renewed only by a call that gives one of them again.

    A push that was stopped is gone on with by calling this again: what the Hub has is not sent again, and if nothing
    is left to do, no commit is made. When the Hub fails, the call is tried again after as long as the Hub asks for,
    but if that is more than five minutes, its error is raised at once. Where `hf_xet` is installed, weights go to a
    storage of their own, whose client tries again for some minutes; `HF_HUB_DISABLE_XET=1` sends them without it.

    Args:
        folder (`str`):
            With `config.json`, weights in safetensors, and mostly a tokenizer.
        repo_id (`str`):
            `"name"` or `"namespace/name"`; made if it does not exist.
        revision (`str`):
            The branch, which must exist if it is another than `main`.
        tag (`str`, *optional*):
            A name for the commit, such as `"v1.0"`.
        private (`bool`, *optional*):
            Whether a repository that is made shall be private; by default as the account is set.
        commit_message (`str`):
            First line of the commit's message.
        facts (`CardFacts`, *optional*):
            For the model card: training data, limits, licence and the like.
        results (`dict[str, Any]`, *optional*):
            For the model card: a file of results.
        with_training_state (`bool`):
            Whether optimizer, scheduler and random states go too, to train on from. They are pickles.
        dry_run (`bool`):
            Only find out what would be done. The Hub is read, if it can be reached; nothing is changed, there or here.
        token (`str`, *optional*):
            By default the one that `hf auth login` or `HF_TOKEN` gave.

    Returns:
        `Publication`: the commit and its files.

    Raises:
        ValueError: if the folder is not fit to be published, see [`check_folder`]; if there are facts or results for
            a card that somebody has edited; if there is no token, no such branch, or a model of another type on it; if
            somebody else has pushed to it meanwhile; if what arrived is not what was sent; or if the tag names another
            commit.
        HfHubHTTPError: if the Hub refuses, or fails again and again.
        ConnectionError: if the storage of `hf_xet` fails.
    """
    files = check_folder(folder, with_training_state=with_training_state, token=token)
    api = HfApi(token=token)
    root = Path(folder)
    make_card = functools.partial(_make_card, root, facts=facts, results=results, token=token)
    if dry_run:
        return _preview(api, root, files, repo_id, revision, make_card, tag=tag, private=private)
    _check_token(token)
    repo_id = retry(lambda: _whole_name(api, repo_id))
    made = make_card(repo_id)
    head, remote = retry(lambda: _state_before(api, repo_id, revision, private))
    hashes = _hashes(root, files, made)
    _check_family(api, root, repo_id, head, remote, hashes)
    for name, content in made.items():
        _put(root / name, content)
    if head is None:
        _make_repo(api, repo_id, private)
        head, remote = retry(lambda: _head_and_tree(api, repo_id, revision))
    plan = _plan(repo_id, head, hashes, remote, made)
    _check_tag(api, plan, tag)
    commit = str(head)
    if plan.uploaded or plan.deleted:
        operations: list[Any] = [CommitOperationAdd(name, root / name) for name in plan.uploaded]
        operations += [CommitOperationDelete(name) for name in plan.deleted]
        commit = _commit_once(api, plan, operations, revision, commit_message, hashes)
    _verify(api, repo_id, commit, hashes)
    if tag is not None:
        _tag(api, repo_id, commit, tag)
    return replace(plan, commit=commit)


def _preview(
    api: HfApi,
    root: Path,
    files: list[str],
    repo_id: str,
    revision: str,
    make_card: Callable[[str], dict[str, bytes]],
    *,
    tag: str | None,
    private: bool | None,
) -> Publication:
    """Find out what would be published. Of a Hub that can't be asked, nothing is taken to be there."""
    head: str | None = None
    remote: dict[str, _FileHash] = {}
    trouble: str | None = None
    try:
        repo_id = _whole_name(api, repo_id)
        head, remote = _state_before(api, repo_id, revision, private)
    except (OSError, HTTPError) as error:
        trouble = _first_line(error)
    made = make_card(repo_id)
    hashes = _hashes(root, files, made)
    plan = _plan(repo_id, head, hashes, remote, made)
    checks = (lambda: _check_family(api, root, repo_id, head, remote, hashes), lambda: _check_tag(api, plan, tag))
    for check in checks:
        try:
            check()
        except (OSError, HTTPError) as error:
            trouble = _first_line(error)
    return replace(plan, trouble=trouble)


def roll_back(
    repo_id: str, to_revision: str, *, revision: str = "main", dry_run: bool = False, token: str | None = None
) -> Publication:
    """Give a branch the files of an earlier commit or tag again, as one new commit. Nothing is lost: history stays.

    Args:
        repo_id (`str`):
            `"name"` or `"namespace/name"`.
        to_revision (`str`):
            Commit or tag whose files shall be there again.
        revision (`str`):
            The branch.
        dry_run (`bool`):
            Only find out what would be done.
        token (`str`, *optional*):
            By default the one that `hf auth login` or `HF_TOKEN` gave.

    Returns:
        `Publication`: the new commit, or the old one if the files are those already.

    Raises:
        ValueError: if there is no token or no such commit; if somebody else has pushed to the branch meanwhile; or if
            the new commit has other files.
        HfHubHTTPError: if the Hub refuses, or fails again and again.
    """
    if not dry_run:
        _check_token(token)
    api = HfApi(token=token)
    repo_id = retry(lambda: _whole_name(api, repo_id))
    head, now = retry(lambda: _head_and_tree(api, repo_id, revision))
    try:
        source, wanted = retry(lambda: _head_and_tree(api, repo_id, to_revision))
    except RevisionNotFoundError as error:
        tags = [each.name for each in retry(lambda: api.list_repo_refs(repo_id).tags)]
        raise ValueError(
            f"`to_revision` must be a commit or a tag of {repo_id}, which has no {to_revision!r}; its tags are "
            f"{', '.join(tags) or 'none'}."
        ) from error
    changed = tuple(sorted(name for name in wanted if not _same(now.get(name), wanted[name])))
    deleted = tuple(sorted(now.keys() - wanted.keys()))
    plan = Publication(repo_id, head, changed, deleted, tuple(sorted(wanted.keys() - set(changed))))
    if dry_run or not (changed or deleted):
        return plan
    operations: list[Any] = [CommitOperationCopy(name, name, src_revision=source) for name in changed]
    operations += [CommitOperationDelete(name) for name in deleted]
    commit = _commit_once(api, plan, operations, revision, f"Go back to {to_revision}", wanted)
    _verify(api, repo_id, commit, wanted)
    return Publication(repo_id, commit, changed, deleted, plan.unchanged)


def _check_token(token: str | None) -> None:
    """Raise if there is no token, without which nothing can be pushed."""
    if not _secrets(token):
        raise ValueError("There is no token for the Hub. Log in with `hf auth login`, or set HF_TOKEN.")


def _make_card(
    folder: Path, repo_id: str, facts: CardFacts | None, results: dict[str, Any] | None, token: str | None
) -> dict[str, bytes]:
    """Make the card and the picture in it, as far as they are new; nothing is written."""
    path = folder / "README.md"
    is_told = facts not in (None, CardFacts()) or results is not None
    if stays(path, is_told=is_told):
        if is_told:
            raise ValueError(
                f"{path} was written or edited by hand, and `facts` or `results` would replace it. Remove it to have "
                "it written anew, or leave these out."
            )
        if repo_id not in path.read_text(encoding="utf-8", errors="replace"):
            logger.warning(f"{path} stays as it is, but does not name {repo_id}: does it belong to this model?")
        return {}
    picture = draw_curve(folder)
    curve = None if picture is None else CURVE
    card = card_of_folder(folder, repo_id, facts, results, curve=curve)
    made = {"README.md": sign_card(card, is_told=is_told).encode()}
    if _has_token(io.BytesIO(made["README.md"]), _secrets(token)):
        raise ValueError("The model card would have a token of the Hub in it; take it out of `facts` or `results`.")
    if picture is not None:
        made[CURVE] = picture
    return {name: content for name, content in made.items() if not _has_content(folder / name, content)}


def _put(path: Path, content: bytes) -> None:
    """Write a file in the place of another; if that is a link into the Hub's cache, what it leads to stays."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def _has_content(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content


def _check_family(
    api: HfApi,
    folder: Path,
    repo_id: str,
    head: str | None,
    remote: dict[str, "_FileHash"],
    hashes: dict[str, "_FileHash"],
) -> None:
    """Raise if the repository has a model of another type, whose files would stay beside the new ones."""
    name = "config.json"
    if name not in remote or _same(remote[name], hashes[name]):
        return
    there = retry(lambda: hf_hub_download(repo_id, name, revision=head, token=api.token))
    theirs, ours = _model_type(Path(there)), _model_type(folder / name)
    if theirs not in (None, ours):
        raise ValueError(
            f"`repo_id` {repo_id} has a model of type {theirs}, and {folder} one of type {ours}: the files of both "
            "would be mixed. Give another repository."
        )


def _model_type(path: Path) -> str | None:
    """Read the type of a model from its config.json, if it is one."""
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError):
        return None


def _hashes(folder: Path, files: list[str], made: dict[str, bytes]) -> dict[str, "_FileHash"]:
    """Hash the files of a folder and those that are yet to be written there."""
    hashes = {}
    for name in files:
        if name not in made:
            with (folder / name).open("rb") as file:
                hashes[name] = _hash_of(file)
    hashes.update({name: _hash_of(io.BytesIO(content)) for name, content in made.items()})
    return dict(sorted(hashes.items()))


class _FileHash(NamedTuple):
    """What identifies a file's content. The Hub tells one of the two: SHA-256 of files in LFS, git's of the others."""

    sha256: str | None
    git: str | None


def _hash_of(file: BinaryIO) -> _FileHash:
    """Compute both hashes in one go."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    sha256, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size)
    while chunk := file.read(_CHUNK):
        sha256.update(chunk)
        git.update(chunk)
    return _FileHash(sha256.hexdigest(), git.hexdigest())


def _same(one: _FileHash | None, other: _FileHash) -> bool:
    """Compare by SHA-256 where both have it, else by git's hash."""
    if one is None:
        return False
    if one.sha256 is not None and other.sha256 is not None:
        return one.sha256 == other.sha256
    return one.git is not None and one.git == other.git


def _state_before(
    api: HfApi, repo_id: str, revision: str, private: bool | None
) -> tuple[str | None, dict[str, _FileHash]]:
    """Return what `_head_and_tree` does, or nothing if the repository is yet to be made."""
    try:
        state = _head_and_tree(api, repo_id, revision)
    except HfHubHTTPError as error:
        if status_of(error) != 404:
            raise
        if isinstance(error, RevisionNotFoundError) or revision != "main":
            raise ValueError(
                f"`revision` must be a branch of {repo_id}, which has no {revision!r}. Make it with "
                "`HfApi.create_branch`, or publish on main."
            ) from error
        return None, {}
    if private:
        logger.warning(f"{repo_id} exists already, so `private` has no effect; change it in its settings on the Hub.")
    return state


def _make_repo(api: HfApi, repo_id: str, private: bool | None) -> None:
    """Make a repository; one that is there already, as after a lost answer, is as good."""

    def attempt() -> None:
        try:
            api.create_repo(repo_id, private=private)
        except HfHubHTTPError as error:
            if status_of(error) != 409 or not api.repo_exists(repo_id):
                raise

    retry(attempt, also=(409,))  # which is also said while another repository of the account is being made


def _head_and_tree(api: HfApi, repo_id: str, revision: str) -> tuple[str | None, dict[str, _FileHash]]:
    """Return the commit that a branch is at and what its files are."""
    head = api.repo_info(repo_id, revision=revision).sha
    entries = list(api.list_repo_tree(repo_id, recursive=True, revision=head))
    files = [entry for entry in entries if isinstance(entry, RepoFile)]
    return head, {
        file.path: _FileHash(file.lfs.sha256, None) if file.lfs else _FileHash(None, file.blob_id) for file in files
    }


def _plan(
    repo_id: str,
    head: str | None,
    hashes: dict[str, _FileHash],
    remote: dict[str, _FileHash],
    made: dict[str, bytes],
) -> Publication:
    """Find out what differs. Of what is only on the Hub, old weights go: they would be loaded with the new ones."""
    uploaded = tuple(name for name in hashes if not _same(remote.get(name), hashes[name]))
    weights = [name for name in remote if "/" not in name and _matches(name, WEIGHT_FILES)]
    deleted = tuple(sorted(name for name in weights if name not in hashes))
    unchanged = tuple(name for name in hashes if name not in uploaded)
    card = made["README.md"].decode() if "README.md" in made else None
    return Publication(repo_id, head, uploaded, deleted, unchanged, card)


def _commit_once(
    api: HfApi,
    plan: Publication,
    operations: list[Any],
    revision: str,
    message: str,
    wanted: dict[str, _FileHash],
) -> str:
    """Make one commit on top of `plan.commit`, whatever the Hub does.

    The Hub refuses a commit whose parent is no longer the head, so a second attempt can't make a second commit. If an
    answer was lost, the head has moved, and its files tell whether that was us.
    """

    def attempt() -> str:
        head, remote = _head_and_tree(api, plan.repo_id, revision)
        if head != plan.commit:
            arrived = all(_same(remote.get(name), wanted[name]) for name in plan.uploaded)
            if arrived and not any(name in remote for name in plan.deleted):
                return str(head)
            raise ValueError(
                f"Somebody else has pushed to {plan.repo_id} ({revision}) meanwhile: it was at {plan.commit} and is "
                f"at {head}. Look at what they did, and publish again."
            )
        info = api.create_commit(
            plan.repo_id,
            operations,
            commit_message=message,
            revision=revision,
            parent_commit=plan.commit,
        )
        return str(info.oid)

    # The branch has moved (412) or is being changed (409): the next attempt finds out who it was.
    return retry(attempt, also=(409, 412))


def _check_tag(api: HfApi, plan: Publication, tag: str | None) -> None:
    """Raise before anything is done if a tag is taken."""
    if tag is None or plan.commit is None:
        return
    tags = {each.name: each.target_commit for each in retry(lambda: api.list_repo_refs(plan.repo_id).tags)}
    if tag in tags and (tags[tag] != plan.commit or plan.uploaded or plan.deleted):
        raise ValueError(f"`tag` {tag!r} names the commit {tags[tag]} of {plan.repo_id} already; give another one.")


def _tag(api: HfApi, repo_id: str, commit: str, tag: str) -> None:
    """Name a commit; a tag that names it already, as after a lost answer, is as good."""
    try:
        retry(lambda: api.create_tag(repo_id, tag=tag, revision=commit))
    except HfHubHTTPError as error:
        named = retry(lambda: api.repo_info(repo_id, revision=tag).sha) if status_of(error) == 409 else None
        if named != commit:
            raise


def _verify(api: HfApi, repo_id: str, commit: str, hashes: dict[str, _FileHash]) -> None:
    """Raise unless the commit has these files."""
    _, remote = retry(lambda: _head_and_tree(api, repo_id, commit))
    different = sorted(name for name in hashes if not _same(remote.get(name), hashes[name]))
    if different:
        raise ValueError(
            f"{repo_id} at {commit} is not what was sent: {', '.join(different[:3])} differ. Publish again, or take "
            "it back with `roll_back`."
        )
