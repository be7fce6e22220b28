"""A page as a browser reads it: every tag with its attributes, and where scripts could have got in."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = ("meta", "link", "input", "br", "img", "wbr")


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    text: str = ""


@dataclass
class Page(HTMLParser):
    """A page of HTML.

    Attributes:
        elements: in document order; the text of an element includes that of its children.
    """

    html: str
    elements: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[Element] = []
        self.feed(self.html)
        self.close()
        assert not self._open, [it.tag for it in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        assert len(element.attributes) == len(attrs), f"repeated attribute: {attrs}"
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def all(self, tag: str) -> list[Element]:
        return [it for it in self.elements if it.tag == tag]

    def by_id(self, name: str) -> Element:
        (found,) = (it for it in self.elements if it.attributes.get("id") == name)
        return found

    def rows(self) -> list[str]:
        """The rows of all tables, as text."""
        return [" ".join(it.text.split()) for it in self.all("tr")]

    def links(self) -> list[str]:
        return [it.attributes["href"] for it in self.all("a")]

    def is_harmless(self) -> bool:
        """Whether there are no scripts but ours, and nothing that the content security policy would have to stop."""
        for it in self.elements:
            assert it.tag in TAGS, it
            assert not any(name.startswith("on") or name == "style" for name in it.attributes), it
            for name in ("href", "src", "action"):
                target = it.attributes.get(name, "/")
                assert target.startswith(("/", "#", GLOSSARY)) or target == "data:,", it
            assert it.tag != "script" or (it.attributes["src"].endswith("/page.js") and not it.text), it
        return True


#: The only address elsewhere.
GLOSSARY = "https://celery-singleton-lock.readthedocs.io/en/latest/web.html#words"

#: The tags that our pages use.
TAGS = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "link",
        "wbr",
        "script",
        "body",
        "a",
        "div",
        "header",
        "nav",
        "main",
        "h1",
        "h2",
        "p",
        "b",
    ),
    *("ul", "li", "dl", "dt", "dd", "form", "label", "input", "button", "select", "option", "span", "strong", "code"),
    *("table", "caption", "thead", "tbody", "tr", "th", "td", "time", "svg", "rect", "text", "footer"),
}
