-- The version comes last: a session that finds it finds the complete schema.
INSERT INTO fencelock.layout (version) VALUES (2) ON CONFLICT DO NOTHING;
