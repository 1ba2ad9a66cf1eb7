-- Last of all: whoever finds the version finds everything.
INSERT INTO fencelock.layout (version) VALUES (1) ON CONFLICT DO NOTHING;
