"""The journal in PostgreSQL. Imported only where a journal's URL names a database: psycopg is an extra."""
