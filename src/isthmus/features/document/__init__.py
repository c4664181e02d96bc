"""A document of headings, paragraphs, tables and figures, and how HTML and Markdown write it."""
