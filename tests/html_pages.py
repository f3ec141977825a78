"""A page of HTML, taken apart, which must be whole by itself."""

import html.parser
import re


class _Parser(html.parser.HTMLParser):
  """Tags with their attributes, the text, and what is left open."""

  def __init__(self):
    super().__init__()
    self.tags, self.text, self.open = [], [], []

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))
    if tag not in ('meta', 'img', 'br'):
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.text.append(data)


def parsed(path) -> _Parser:
  """Returns the tags and texts of a file, which runs and loads nothing from elsewhere."""
  page = _Parser()
  page.feed(path.read_text(encoding='utf-8'))
  assert not page.open
  names = {name for name, _ in page.tags}
  assert not names & {'script', 'link', 'iframe', 'object', 'embed', 'form'}
  for _, attributes in page.tags:
    assert not [key for key in attributes if key.startswith('on')]
    assert attributes.get('href', '#').startswith('#')
    assert attributes.get('src', 'data:image/').startswith('data:image/')
  assert not re.search(r'url\(|@import|https?:', ''.join(page.text))
  return page
