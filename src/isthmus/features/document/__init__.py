"""Documents of headings, paragraphs, tables and figures, written as HTML and Markdown."""
