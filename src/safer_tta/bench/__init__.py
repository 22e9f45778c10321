"""From a stream and a method to rows, tables, figures and pages."""
