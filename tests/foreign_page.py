"""A foreign web page in a real browser that tries to use the HTTP port of a service: `make foreign-page`.

Needs Chromium: its path, or `chromium` on the PATH. The service has no authentication, so that only the protection
against pages is tried: every request that the page makes must be refused, and nothing of an answer be read. Tests do
the same with the headers that browsers send.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from service_setup import engine_on

from broker_io.memory import MemoryBroker
from txnbuffer.config import AccessConfig
from txnbuffer.service.door.access import Access
from txnbuffer.service.servers.admin import ServiceAdmin
from txnbuffer.service.servers.admin_calls import AdminCalls
from txnbuffer.service.servers.http_server import HttpServer

SECONDS = 60
PAGE = """<!doctype html><html><body><pre id=out></pre><iframe name=frame></iframe><script>
const base = 'TARGET', results = {}, say = (name, text) => { results[name] = text; };
const json = {'Content-Type': 'application/json'};
const tries = {
  'fetch of JSON': () => fetch(base + '/admin/List', {method: 'POST', headers: json, body: '{}'}),
  'fetch of text': () => fetch(base + '/admin/List', {method: 'POST', body: '{}'}),
  'fetch without CORS': () => fetch(base + '/admin/List', {method: 'POST', mode: 'no-cors', body: '{}'}),
  'fetch with credentials': () => fetch(base + '/health', {credentials: 'include'}),
  'fetch of metrics': () => fetch(base + '/metrics'),
  'fetch without CORS of metrics': () => fetch(base + '/metrics', {mode: 'no-cors'}),
};
const frame = document.querySelector('iframe');
async function all() {
  for (const [name, attempt] of Object.entries(tries)) {
    try { const answer = await attempt(); say(name, 'read: ' + answer.type + ' ' + await answer.text()); }
    catch (error) { say(name, 'failed: ' + error); }
  }
  for (const kind of ['script', 'img', 'iframe']) {
    await new Promise(done => {
      const element = document.createElement(kind);
      element.onload = () => { say(kind, 'loaded'); done(); };
      element.onerror = () => { say(kind, 'failed'); done(); };
      element.src = base + '/health';
      document.body.append(element);
    });
  }
  for (const type of ['text/plain', 'application/x-www-form-urlencoded']) {
    const form = document.createElement('form');
    form.method = 'POST'; form.action = base + '/admin/List'; form.enctype = type; form.target = 'frame';
    document.body.append(form);
    await new Promise(done => { frame.onload = done; form.submit(); });
    const shown = frame.contentDocument;
    say('form ' + type, shown === null ? 'hidden' : 'read: ' + shown.body.textContent);
  }
  await fetch('/results', {method: 'POST', body: JSON.stringify(results)});
}
all();
</script></body></html>"""


class Foreign(BaseHTTPRequestHandler):
    """Serves the page; `server.results` has what it could do."""

    def do_GET(self) -> None:
        self.answer(self.server.page.encode())  # type: ignore[attr-defined]  # of the server of this page

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.results.update(json.loads(body))  # type: ignore[attr-defined]  # of the server of this page
        self.answer(b"")
        self.server.reported.set()  # type: ignore[attr-defined]  # of the server of this page

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def foreign_site(target: str) -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Foreign) as server:
        site: Any = server
        site.page, site.results, site.reported = PAGE.replace("TARGET", target), {}, threading.Event()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield site
        server.shutdown()


def browse(chromium: str, url: str, until: threading.Event | None) -> str:
    """Open a page, in which all of evil.example is this machine; what the browser shows at the end."""
    with tempfile.TemporaryDirectory() as profile:
        flags = ["--no-sandbox", f"--user-data-dir={profile}", "--disable-gpu", "--disable-dev-shm-usage"]
        flags += ["--host-resolver-rules=MAP evil.example 127.0.0.1", "--remote-debugging-port=0"]
        if until is None:
            command = [chromium, *flags[:-1], "--dump-dom", url]
            return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True).stdout
        process = subprocess.Popen([chromium, *flags, url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            assert until.wait(SECONDS), "the page did not report what it could do"
        finally:
            process.kill()
            process.wait()
        return ""


async def main(chromium: str) -> None:
    denied: list[str] = []
    answered: list[str] = []

    def log(event: str, **facts: Any) -> None:
        denied.append(facts["error"])

    class Counted(AdminCalls):
        async def answer(self, name: str, *rest: Any) -> Any:
            answered.append(name)
            return await super().answer(name, *rest)

    async with engine_on(MemoryBroker()) as engine:
        access, admin = Access(AccessConfig(), log), Counted()
        admin.serve(engine, ServiceAdmin(engine))
        http = HttpServer(admin=admin, access=access)
        http.engine = engine
        await http.start("127.0.0.1:0")
        for target in ("127.0.0.1", "localhost"):
            for page in ("evil.example", "localhost"):  # another site, and another port of this host
                before, size = access.denied["NotAuthorized"], len(denied)
                with foreign_site(f"http://{target}:{http.port}") as site:
                    url = f"http://{page}:{site.server_port}/"
                    await asyncio.to_thread(browse, chromium, url, site.reported)
                    refused = access.denied["NotAuthorized"] - before
                    print(f"page of {page} at {target}: {refused} requests refused; it saw:")
                    for name, text in site.results.items():
                        print(f"  {name}: {text}")
                    read = [text for text in site.results.values() if text.startswith("read: ")]
                    assert {*read} <= {"read: opaque "}, read
                    assert refused >= 6, denied[size:]
        rebound = await asyncio.to_thread(browse, chromium, f"http://evil.example:{http.port}/health", None)
        print(f"evil.example that resolves to the service: {rebound}")
        assert "NotAuthorized" in rebound
        assert "running" not in rebound
        own = await asyncio.to_thread(browse, chromium, f"http://localhost:{http.port}/health", None)
        assert "running" in own  # somebody who types the address
        await http.stop()
    assert answered == [], answered


if __name__ == "__main__":
    found = sys.argv[1] if len(sys.argv) > 1 else shutil.which("chromium") or shutil.which("chromium-headless-shell")
    if found is None:
        sys.exit("no Chromium: give its path, CHROMIUM=…")
    asyncio.run(main(found))
