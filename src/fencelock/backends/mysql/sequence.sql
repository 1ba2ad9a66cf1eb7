-- MariaDB: the source of all tokens. It goes on from the end of what it had reserved when the server crashed, and is moved up to
-- the server's clock, in µs, whenever a client connects.
CREATE SEQUENCE IF NOT EXISTS fencelock_tokens MINVALUE 1 MAXVALUE 9007199254740991 CACHE 1000 ENGINE=InnoDB;
