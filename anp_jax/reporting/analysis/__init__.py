"""An evaluation in depth: tables, figures and a page, from examples' rows."""
