"""A contract of import-linter that says what may be imported; everything else may not (``.importlinter``).

Looks at direct imports alone: what those that are allowed import is the matter of their own contracts.
"""

from __future__ import annotations

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class AllowedContract(Contract):
    """``importers`` and all below them import of their own package what is in ``allowed`` or below it,
    themselves, and ``oobleckd`` for its version.

    ``external``, where it is given: the top-level names outside of the package that they may import.
    """

    type_name = "allowed"

    importers = fields.SetField(subfield=fields.ModuleField())
    allowed = fields.SetField(subfield=fields.StringField(), required=False)
    external = fields.SetField(subfield=fields.StringField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        found = [
            (module, imported, _lines(graph, module, imported))
            for importer in sorted(self.importers, key=lambda each: each.name)
            for module in sorted({importer.name, *graph.find_descendants(importer.name)})
            for imported in sorted(graph.find_modules_directly_imported_by(module))
            if not self._may(imported, importer.name, importer.root_package_name)
        ]
        return ContractCheck(kept=not found, metadata={"found": found})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for module, imported, lines in check.metadata["found"]:
            output.print_error(f"{module} may not import {imported} (line {lines})", bold=False)

    def _may(self, imported: str, importer: str, root: str) -> bool:
        if imported.partition(".")[0] != root:
            return not self.external or imported.partition(".")[0] in self.external
        ours = {importer, *(self.allowed or ())}
        return imported == root or any(f"{imported}.".startswith(f"{each}.") for each in ours)


def _lines(graph: ImportGraph, module: str, imported: str) -> str:
    details = graph.get_import_details(importer=module, imported=imported)
    return ", ".join(str(each["line_number"]) for each in details)
