"""The documentation that stands below a field in its class, read from the source: the one place where it is written.

Python keeps the docstring of a class but not those of its fields or enum members. Schemas, ``pdq settings`` and
``pdq states`` want both.
"""

import ast
import functools
import inspect
import itertools
import textwrap


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The string literal after each annotated field or enum member of ``cls`` (its own, not inherited ones)."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs: dict[str, str] = {}
    for field, after in itertools.pairwise(body):
        match field, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = prose(text)
    return docs


def prose(docstring: str) -> str:
    """Docstring text as CommonMark: paragraphs unwrapped, literals in single backticks."""
    paragraphs = inspect.cleandoc(docstring).replace("``", "`").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
