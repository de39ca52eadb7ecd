"""The documentation that stands below a field in its class, read from the source: the one place where it is written.

Python keeps the docstring of a class but not those of its fields. Schemas and ``pdq settings`` want both.
"""

import ast
import functools
import inspect
import itertools
import textwrap


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The string literal after each annotated field of ``cls`` (its own fields, not inherited ones)."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs: dict[str, str] = {}
    for field, after in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            docs[field.target.id] = prose(after.value.value)
    return docs


def prose(docstring: str) -> str:
    """Docstring text as CommonMark: paragraphs unwrapped, literals in single backticks."""
    paragraphs = inspect.cleandoc(docstring).replace("``", "`").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
