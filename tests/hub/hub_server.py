"""A Hub on localhost: it keeps commits and files on disk, checks every hash, and refuses what the real Hub refuses.

    python tests/hub/hub_server.py FOLDER        prints its address and serves until it is killed

It implements the part of the protocol that models need: repositories, commits, LFS, trees, downloads. A test injects
faults by POST /test/faults with a list of {"method", "path" (a regular expression), "skip" (requests to let pass),
"times", and one of "status" (with "headers"), "drop" (close the connection "before" or "after" the request takes
effect), "cut" (bytes of the request to read before closing the connection), "truncate" (bytes of the answer to send),
"corrupt", or "cas" (the address to which xet sends its data)}; "wait" (seconds before the answer, or before closing)
goes with any of them or alone. GET /test/log lists all requests.
"""

import base64
import hashlib
import json
import os
import re
import sys
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


TOKEN = "hf_" + "A" * 37  # has the right to write
USER = "alice"
LFS_FROM = 2000  # bytes; small, so that the weights of tiny models are in LFS
INITIAL = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}


class RefusedError(Exception):
    """An error that is sent as the answer."""

    def __init__(self, status, code, message, **headers):
        super().__init__(message)
        self.status, self.headers = status, {"X-Error-Code": code, "X-Error-Message": message, **headers}


def git_hash(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Store:
    """Repositories on disk. A commit appears when its file is complete, so a killed server loses nothing."""

    def __init__(self, root):
        self.root = Path(root)
        (self.root / "blobs").mkdir(parents=True, exist_ok=True)
        self.lock = threading.RLock()
        self.state = {}
        if (self.root / "state.json").exists():
            self.state = json.loads((self.root / "state.json").read_text())

    def save(self):
        temporary = self.root / "state.json.tmp"
        temporary.write_text(json.dumps(self.state))
        os.replace(temporary, self.root / "state.json")

    def put(self, content):
        name = hashlib.sha256(content).hexdigest()
        (self.root / "blobs" / name).write_bytes(content)
        return name

    def has(self, sha256):
        return (self.root / "blobs" / sha256).exists()

    def take_from_xet(self):
        """Read the files that a client wrote to the folder of xet: one per xorb, not compressed, in chunks."""
        for path in self.root.glob("cas/xet/xorbs/xorbs/default.*"):
            xorb, content = path.read_bytes(), b""
            # A chunk's header: version 0, its size, its compression (0: none) and its size before compression.
            while xorb[:1] == b"\0" and xorb[4:5] == b"\0":
                size = int.from_bytes(xorb[1:4], "little")
                content += xorb[8 : 8 + size]
                xorb = xorb[8 + size :]
            self.put(content)

    def get(self, sha256):
        return (self.root / "blobs" / sha256).read_bytes()

    def create(self, repo):
        self.state[repo] = {"branches": {"main": None}, "tags": {}, "commits": {}}
        files = {path: self.entry(content, lfs=False) for path, content in INITIAL.items()}
        self.commit(repo, "main", files, [], "initial commit")

    def entry(self, content, *, lfs):
        return {"sha256": self.put(content), "git": git_hash(content), "size": len(content), "lfs": lfs}

    def repo(self, name):
        if name not in self.state:
            raise RefusedError(404, "RepoNotFound", "Repository not found")
        return self.state[name]

    def resolve(self, name, revision):
        repo = self.repo(name)
        found = repo["branches"].get(revision) or repo["tags"].get(revision)
        found = found or (revision if revision in repo["commits"] else None)
        if found is None:
            raise RefusedError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found

    def files(self, name, revision):
        return self.state[name]["commits"][self.resolve(name, revision)]["files"]

    def commit(self, name, branch, added, deleted, title):
        repo = self.state[name]
        parent = repo["branches"][branch]
        files = dict(repo["commits"][parent]["files"]) if parent else {}
        for path in deleted:
            if path not in files:
                raise RefusedError(400, "BadRequest", f"{path} does not exist and can't be deleted")
            del files[path]
        files.update(added)
        number = len(repo["commits"])
        oid = hashlib.sha1(json.dumps([name, number, parent, title, sorted(files)]).encode()).hexdigest()
        repo["commits"][oid] = {"files": files, "parent": parent, "title": title}
        repo["branches"][branch] = oid
        self.save()
        return oid


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each answer waits some 40 ms for a delayed acknowledgement

    def log_message(self, *arguments):
        pass

    def read_body(self, cut):
        if cut is not None:
            return self.rfile.read(cut)
        if (self.headers.get("Transfer-Encoding") or "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def answer(self, status, content=None, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content if content is not None else {}).encode()
        if "Content-Type" not in headers:
            headers["Content-Type"] = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        claimed = len(body)
        fault = self.fault or {}
        time.sleep(fault.get("wait", 0))
        if status < 300 and fault.get("corrupt") and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        self.send_response(status)
        for name, value in {"Content-Length": str(claimed), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            if "truncate" in fault:
                self.close_connection = True
                body = body[: fault["truncate"]]
            self.wfile.write(body)

    def handle_request(self):
        parts = urllib.parse.urlsplit(self.path)
        self.path_only = urllib.parse.unquote(parts.path)
        self.query = urllib.parse.parse_qs(parts.query)
        self.fault = None
        store, server = self.server.store, self.server
        if self.path_only == "/test/faults":
            server.faults = json.loads(self.read_body(None))
            return self.answer(200)
        if self.path_only == "/test/log":
            return self.answer(200, server.log)
        with store.lock:
            self.fault = self.next_fault()
        fault = self.fault or {}
        body = self.read_body(fault.get("cut"))
        with store.lock:
            server.log.append(
                {
                    "method": self.command,
                    "path": self.path_only,
                    "authorization": self.headers.get("Authorization"),
                    "size": len(body),
                }
            )
        if fault.get("drop") == "before" or "cut" in fault:
            return self.drop()
        if "status" in fault:
            name = "Injected"
            headers = {"X-Error-Code": name, "X-Error-Message": "injected", **fault.get("headers", {})}
            return self.answer(fault["status"], {"error": "injected"}, **headers)
        try:
            with store.lock:
                result = self.route(body)
        except RefusedError as refusal:
            if fault.get("drop") == "after":
                return self.drop()
            content = {"error": str(refusal)}
            if refusal.status == 409:
                content["url"] = f"{self.base}/{getattr(self, 'named', '')}"
            return self.answer(refusal.status, content, **refusal.headers)
        if fault.get("drop") == "after":
            return self.drop()
        status, content, headers = result
        return self.answer(status, content, **headers)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request  # noqa: N815

    def drop(self):
        time.sleep(self.fault.get("wait", 0))
        self.close_connection = True
        self.connection.close()

    def next_fault(self):
        for fault in self.server.faults:
            if fault["method"] == self.command and re.search(fault["path"], self.path_only):
                if fault.get("skip", 0) > 0:
                    fault["skip"] -= 1
                elif fault.setdefault("times", 1) > 0:
                    fault["times"] -= 1
                    return fault
        return None

    @property
    def base(self):
        return f"http://{self.headers['Host']}"

    def must_write(self):
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise RefusedError(401, "Unauthorized", "Invalid username or password.")

    def route(self, body):
        for method, pattern, function in ROUTES:
            match = re.fullmatch(pattern, self.path_only)
            if match and self.command in method:
                return function(self, body, *match.groups())
        raise RefusedError(404, "NotHere", f"{self.command} {self.path_only}")

    def whoami(self, body):
        self.must_write()
        auth = {"type": "access_token", "accessToken": {"displayName": "test", "role": "write"}}
        return 200, {"type": "user", "name": USER, "orgs": [], "auth": auth}, {}

    def create_repo(self, body):
        self.must_write()
        asked = json.loads(body)
        self.named = f"{asked.get('organization') or USER}/{asked['name']}"
        if self.named in self.server.store.state:
            raise RefusedError(409, "Conflict", "You already created this model repo")
        self.server.store.create(self.named)
        return 200, {"url": f"{self.base}/{self.named}", "name": self.named, "id": "1"}, {}

    def validate_yaml(self, body):
        content = json.loads(body)["content"]
        front = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", content, flags=re.DOTALL)
        errors = [] if front or not content.startswith("---") else [{"message": "front matter has no end"}]
        return (400 if errors else 200), {"errors": errors, "warnings": []}, {}

    def preupload(self, body, repo, revision):
        self.must_write()
        there = self.server.store.files(repo, revision)
        found = []
        for file in json.loads(body)["files"]:
            is_lfs = file["path"].endswith(".safetensors") or file["size"] >= LFS_FROM * 50
            entry = {"path": file["path"], "uploadMode": "lfs" if is_lfs else "regular", "shouldIgnore": False}
            if file["path"] in there:
                known = there[file["path"]]
                entry["oid"] = known["sha256"] if known["lfs"] else known["git"]
            found.append(entry)
        return 200, {"files": found}, {}

    def lfs_batch(self, body, repo):
        self.must_write()
        self.server.store.repo(repo)
        objects = []
        for each in json.loads(body)["objects"]:
            known = {"oid": each["oid"], "size": each["size"]}
            if not self.server.store.has(each["oid"]):
                upload = {"href": f"{self.base}/lfs/{each['oid']}", "header": {}}
                known["actions"] = {"upload": upload, "verify": {"href": f"{self.base}/lfs-verify", "header": {}}}
            objects.append(known)
        return 200, {"transfer": "basic", "objects": objects}, {}

    def xet_token(self, body, repo, revision):
        self.must_write()
        self.server.store.resolve(repo, revision)
        # The client itself writes into a local folder.
        url = (self.fault or {}).get("cas", f"local://{self.server.store.root}/cas")
        return 200, {"casUrl": url, "exp": 4102444800, "accessToken": "of xet"}, {}

    def lfs_put(self, body, sha256):
        if hashlib.sha256(body).hexdigest() != sha256:
            raise RefusedError(400, "BadDigest", "the content does not match its name")
        self.server.store.put(body)
        return 200, {}, {}

    def lfs_verify(self, body):
        asked = json.loads(body)
        store = self.server.store
        is_there = store.has(asked["oid"]) and len(store.get(asked["oid"])) == asked["size"]
        return (200 if is_there else 404), {}, {}

    def make_commit(self, body, repo, branch):
        self.must_write()
        store = self.server.store
        branches = store.repo(repo)["branches"]
        if branch not in branches:
            raise RefusedError(404, "RevisionNotFound", f"no branch {branch}")
        added, deleted, header = {}, [], {}
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                header = value
                continue
            path = value["path"]
            if path.startswith("/") or ".." in path.split("/") or path.startswith(".git/"):
                raise RefusedError(400, "BadRequest", f"invalid path {path}")
            if entry["key"] == "file":
                added[path] = store.entry(base64.b64decode(value["content"]), lfs=False)
            elif entry["key"] == "lfsFile":
                if not store.has(value["oid"]):
                    store.take_from_xet()
                if not store.has(value["oid"]):
                    raise RefusedError(400, "MissingLfs", f"a pointer names {value['oid']}, which was not uploaded")
                added[path] = store.entry(store.get(value["oid"]), lfs=True)
            elif entry["key"] == "deletedFile":
                deleted.append(path)
            else:
                raise RefusedError(400, "BadRequest", f"unknown operation {entry['key']}")
        if header.get("parentCommit") not in (None, branches[branch]):
            raise RefusedError(412, "PreconditionFailed", "A commit has happened since. Please refresh and try again.")
        if not added and not deleted:
            raise RefusedError(400, "BadRequest", "nothing to commit")
        oid = store.commit(repo, branch, added, deleted, header["summary"])
        url = f"{self.base}/{repo}/commit/{oid}"
        return 200, {"success": True, "commitOid": oid, "commitUrl": url, "pullRequestUrl": None}, {}

    def tree_entry(self, path, file):
        entry = {"type": "file", "path": path, "oid": file["git"], "size": file["size"]}
        if file["lfs"]:
            entry["lfs"] = {"oid": file["sha256"], "size": file["size"], "pointerSize": 134}
            entry["oid"] = git_hash(file["sha256"].encode())  # that of the pointer
        return entry

    def tree(self, body, repo, rest):
        revision, _, folder = rest.partition("/")
        files = self.server.store.files(repo, revision)
        inside = [path for path in sorted(files) if path.startswith(f"{folder}/" if folder else "")]
        if not inside:
            raise RefusedError(404, "EntryNotFound", f"{folder} does not exist")
        return 200, [self.tree_entry(path, files[path]) for path in inside], {}

    def paths_info(self, body, repo, revision):
        files = self.server.store.files(repo, revision)
        asked = urllib.parse.parse_qs(body.decode()).get("paths", [])
        return 200, [self.tree_entry(path, files[path]) for path in asked if path in files], {}

    def info(self, body, repo, revision="main"):
        store = self.server.store
        oid = store.resolve(repo, revision)
        files = store.state[repo]["commits"][oid]["files"]
        config = json.loads(store.get(files["config.json"]["sha256"])) if "config.json" in files else {}
        siblings = [{"rfilename": path} for path in sorted(files)]
        common = {"id": repo, "modelId": repo, "sha": oid, "private": False, "gated": False, "disabled": False}
        return 200, {**common, "tags": [], "downloads": 0, "likes": 0, "config": config, "siblings": siblings}, {}

    def add_tag(self, body, repo, revision):
        self.must_write()
        store = self.server.store
        name = json.loads(body)["tag"]
        if name in store.repo(repo)["tags"]:
            raise RefusedError(409, "Conflict", "Tag reference exists already")
        store.repo(repo)["tags"][name] = store.resolve(repo, revision)
        store.save()
        return 200, {}, {}

    def add_branch(self, body, repo, name):
        self.must_write()
        store = self.server.store
        if name in store.repo(repo)["branches"]:
            raise RefusedError(409, "Conflict", "Reference already exists")
        store.repo(repo)["branches"][name] = store.resolve(
            repo, json.loads(body or b"{}").get("startingPoint", "main")
        )
        store.save()
        return 200, {}, {}

    def refs(self, body, repo):
        known = self.server.store.repo(repo)
        kinds = (("branches", "heads"), ("tags", "tags"))
        found = {
            kind: [
                {"name": name, "ref": f"refs/{ref}/{name}", "targetCommit": oid} for name, oid in known[kind].items()
            ]
            for kind, ref in kinds
        }
        return 200, {**found, "converts": []}, {}

    def commits(self, body, repo, revision):
        store = self.server.store
        oid, found = store.resolve(repo, revision), []
        while oid:
            commit = store.state[repo]["commits"][oid]
            found.append({"id": oid, "title": commit["title"], "message": "", "authors": [], "date": DATE})
            oid = commit["parent"]
        return 200, found, {}

    def download(self, body, repo, revision, path):
        store = self.server.store
        oid = store.resolve(repo, revision)
        files = store.files(repo, oid)
        if path not in files:
            raise RefusedError(404, "EntryNotFound", "Entry not found", **{"X-Repo-Commit": oid})
        file = files[path]
        content = store.get(file["sha256"])
        etag = file["sha256"] if file["lfs"] else file["git"]
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": oid, "Accept-Ranges": "bytes"}
        if file["lfs"]:
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(file["size"])}
        wanted = re.match(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if wanted is None:
            return 200, content, headers
        start = int(wanted[1])
        headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return 206, content[start:], headers


DATE = "2026-01-01T00:00:00.000Z"
REPO = r"([^/]+/[^/]+)"
API = rf"/api/models/{REPO}"
ROUTES = [
    (("GET",), "/api/whoami-v2", Handler.whoami),
    (("POST",), "/api/repos/create", Handler.create_repo),
    (("POST",), "/api/validate-yaml", Handler.validate_yaml),
    (("POST",), rf"{API}/preupload/(.+)", Handler.preupload),
    (("POST",), rf"{API}/commit/(.+)", Handler.make_commit),
    (("POST",), rf"{API}/paths-info/(.+)", Handler.paths_info),
    (("POST",), rf"{API}/tag/(.+)", Handler.add_tag),
    (("POST",), rf"{API}/branch/(.+)", Handler.add_branch),
    (("GET",), rf"{API}/tree/(.+)", Handler.tree),
    (("GET",), rf"{API}/refs", Handler.refs),
    (("GET",), rf"{API}/commits/(.+)", Handler.commits),
    (("GET",), rf"{API}/revision/(.+)", Handler.info),
    (("GET",), API, Handler.info),
    (("GET",), rf"{API}/xet-write-token/(.+)", Handler.xet_token),
    (("POST",), rf"/{REPO}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    (("PUT",), r"/lfs/([0-9a-f]{64})", Handler.lfs_put),
    (("POST",), "/lfs-verify", Handler.lfs_verify),
    (("GET", "HEAD"), rf"/{REPO}/resolve/([^/]+)/(.+)", Handler.download),
]


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2]) if len(sys.argv) > 2 else 0), Handler)
    server.daemon_threads = True
    server.store, server.faults, server.log = Store(sys.argv[1]), [], []
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
