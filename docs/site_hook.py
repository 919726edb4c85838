"""ProperDocs hook that gives the site the layout of the repository, so that relative links work in both.

Each page keeps its path in the repository: `README.md`, `docs/guide.md`. A source file that a page links to becomes a
page with the text of the file; a directory becomes a page that lists its files. The pages of errors and of commands
get their content. Drawings become part of their pages, so that they are light or dark as the page is. The header has
the version, and the link to the repository if `pyproject.toml` has its address.
"""

from __future__ import annotations

import ast
import posixpath
import re
import tomllib
from html import unescape
from pathlib import Path
from urllib.parse import urlsplit

from command_pages import COMMANDS, commands
from properdocs.config.defaults import MkDocsConfig
from properdocs.structure.files import File, Files, InclusionLevel

import txnbuffer

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(([^)#]+)")
DRAWING = re.compile(r'<img alt="[^"]*" src="(?:\.\./|docs/)*(pictures/[\w-]+\.svg)" ?/?>')
CODE = re.compile(r'<div class="highlight">(<pre>.*?</pre>)', re.DOTALL)
ERRORS = "<!-- Here docs/site_hook.py puts a table of the errors that txnbuffer exports, and their descriptions. -->"
ERROR_ENTRY = """
::: txnbuffer.{}
    options: {{merge_init_into_class: false, filters: ["!^_"]}}
"""


class SourcePage(File):
    """A page made from a file or a directory that is not Markdown."""

    def is_documentation_page(self) -> bool:
        return True


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show the version, and link to the repository, in the header of each page."""
    config.site_name = f"{config.site_name} {txnbuffer.__version__}"
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    if address := urls.get("Repository") or urls.get("Source"):
        config.repo_url, config.repo_name = address, urlsplit(address).path.strip("/")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the files of the theme, the Markdown pages at their paths in the repository, and the source pages."""
    site = Files(file for file in files if file.src_dir != config.docs_dir)
    pages = [f"docs/{file.src_uri}" for file in files if file.src_dir == config.docs_dir]
    pages += [path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("examples/*.md"))]
    for path in pages:
        site.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    for path in sorted(links(site) - set(pages)):
        content = source_page(path)
        site.append(SourcePage.generated(config, path, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return site


def links(site: Files) -> set[str]:
    """Return the paths in the repository that the pages link to, as far as they exist."""
    found = set()
    for page in site.documentation_pages():
        for link in LINK.findall(page.content_string):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(page.src_uri), link))
            if not path.startswith("..") and (ROOT / path).exists():
                found.add(path)
    return found


def source_page(path: str) -> str:
    """Return the Markdown of the page for a source file or a directory."""
    source = ROOT / path
    if source.is_dir():
        text = "\n".join(entry(item) for item in sorted(source.iterdir()) if not item.name.startswith((".", "__")))
    else:
        text = f"~~~~~~ {'python' if source.suffix == '.py' else 'text'}\n{source.read_text()}\n~~~~~~"
    return f"---\nhide: [toc]\nsearch: {{exclude: true}}\n---\n# {path}\n\n{text}\n"


def entry(item: Path) -> str:
    """Return the line of a file or sub-directory in the list of its directory."""
    module = item / "__init__.py" if item.is_dir() else item
    described = module.suffix == ".py" and module.exists() and ast.get_docstring(ast.parse(module.read_text()))
    summary = f": {described.splitlines()[0]}" if described else ""
    return f"- `{item.name}{'/' * item.is_dir()}`{summary}"


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the text of a page with the descriptions of errors and commands where it asks for them."""
    for place, content in ((ERRORS, errors), (COMMANDS, commands)):
        if place in markdown:
            markdown = markdown.replace(place, content())
    return markdown


def on_post_page(output: str, **_: object) -> str:
    """Return a page with the drawings themselves where it refers to their files, and drawings in characters marked."""
    output = DRAWING.sub(lambda found: (ROOT / "docs" / found[1]).read_text(), output)
    return CODE.sub(marked, output)


def marked(code: re.Match[str]) -> str:
    """Return a block of code with its width as a style if it is a drawing in characters."""
    lines = re.sub("<[^>]*>", "", unescape(code[1])).splitlines()
    if not any("───" in line for line in lines):
        return code[0]
    return f'<div class="highlight characters" style="--columns: {max(map(len, lines))}">{code[1]}'


def errors() -> str:
    """Return a table of the errors that txnbuffer exports, and a reference entry for each."""
    exported = {name: getattr(txnbuffer, name) for name in txnbuffer.__all__}
    classes = {name: each for name, each in exported.items() if isinstance(each, type) and issubclass(each, Exception)}
    lines = ["| error | fault | exit code | retryable | gRPC status |", "|---|---|---|---|---|"]
    for name, error in classes.items():
        retryable = "yes" if error.retryable else "no"
        cells = [f"[`{name}`][txnbuffer.{name}]", error.fault.value, str(error.exit_code), retryable, error.grpc_status]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *map(ERROR_ENTRY.format, classes)])
