import pytest

from launcher.config import Config, Section
from tests.pages.keys_page import field_docs


def sections(cls: type[Section]) -> set[type[Section]]:
    found = {cls}
    for key in cls.model_fields:
        for member in cls.sections_of(key):
            found |= sections(member)
    return found


@pytest.mark.parametrize("section", sorted(sections(Config), key=lambda cls: cls.__name__))
def test_every_key_has_a_doc(section: type[Section]) -> None:
    assert section.__doc__
    assert set(field_docs(section)) == set(section.model_fields)
    assert all(doc[-1] in ".]" or ":" in doc for doc in field_docs(section).values())


def test_attributes_are_the_keys_of_the_json() -> None:
    assert len(sections(Config)) >= 15
    assert field_docs(Config)["bf16"].startswith("bfloat16 training")
