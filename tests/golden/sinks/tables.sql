PRAGMA application_id = 1954049634;
PRAGMA user_version = 1;
PRAGMA journal_mode = wal;
BEGIN TRANSACTION;
CREATE TABLE "blobs" (
  key BLOB NOT NULL PRIMARY KEY,
  value BLOB NOT NULL,
  properties TEXT,
  event_time INTEGER,
  publish_time INTEGER,
  seqno INTEGER NOT NULL,
  position TEXT NOT NULL
);
INSERT INTO "blobs" VALUES(X'61',X'6F6E65',NULL,NULL,NULL,1,'1:1');
CREATE TABLE "blobs_keyless" (
  seqno INTEGER NOT NULL PRIMARY KEY,
  value BLOB,
  properties TEXT,
  event_time INTEGER,
  publish_time INTEGER,
  position TEXT NOT NULL
);
CREATE TABLE "blobs_undo" (
  point INTEGER NOT NULL,
  key BLOB NOT NULL,
  value BLOB,
  properties TEXT,
  event_time INTEGER,
  publish_time INTEGER,
  seqno INTEGER,
  position TEXT,
  PRIMARY KEY (point, key)
) WITHOUT ROWID;
CREATE TABLE "t" (
  key TEXT NOT NULL PRIMARY KEY,
  value TEXT NOT NULL,
  properties TEXT,
  event_time INTEGER,
  publish_time INTEGER,
  seqno INTEGER NOT NULL,
  position TEXT NOT NULL
);
INSERT INTO "t" VALUES('b','2',NULL,NULL,NULL,9,'1:9');
INSERT INTO "t" VALUES('c','',NULL,NULL,NULL,8,'1:8');
INSERT INTO "t" VALUES(X'6E00',X'6E00',NULL,NULL,NULL,5,'2:1');
INSERT INTO "t" VALUES(X'FF',X'FE',NULL,NULL,NULL,4,'2:0');
CREATE TABLE "t_keyless" (
  seqno INTEGER NOT NULL PRIMARY KEY,
  value TEXT,
  properties TEXT,
  event_time INTEGER,
  publish_time INTEGER,
  position TEXT NOT NULL
);
INSERT INTO "t_keyless" VALUES(3,'keyless',NULL,NULL,NULL,'1:3');
INSERT INTO "t_keyless" VALUES(6,NULL,NULL,NULL,NULL,'2:2');
CREATE TABLE "t_undo" (
  point INTEGER NOT NULL,
  key TEXT NOT NULL,
  value TEXT,
  properties TEXT,
  event_time INTEGER,
  publish_time INTEGER,
  seqno INTEGER,
  position TEXT,
  PRIMARY KEY (point, key)
) WITHOUT ROWID;
INSERT INTO "t_undo" VALUES(3,'a','one',NULL,NULL,NULL,1,'1:1');
INSERT INTO "t_undo" VALUES(3,'b','zwei é','{"n": "1", "m": "é"}',1357034400000,1700000000000,2,'1:9:3');
INSERT INTO "t_undo" VALUES(3,'c',NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "t_undo" VALUES(3,X'',NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "t_undo" VALUES(3,X'6E00',NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "t_undo" VALUES(3,X'FF',NULL,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE txnbuffer_topics (
  topic TEXT NOT NULL PRIMARY KEY,
  name TEXT NOT NULL UNIQUE COLLATE NOCASE,
  binary INTEGER NOT NULL,
  token TEXT,
  seqno INTEGER NOT NULL,
  complete INTEGER NOT NULL,
  undo_from INTEGER NOT NULL
);
INSERT INTO "txnbuffer_topics" VALUES('t','t',0,'{"v":1,"cluster":"c-1","topic":"t","incarnation":"i-1","versions":[[16,0]],"seqno":9,"snapshot":[9,9],"purge":0}',9,1,1);
INSERT INTO "txnbuffer_topics" VALUES('u','blobs',1,'{"v":1,"cluster":"c-1","topic":"t","incarnation":"i-1","versions":[[16,0]],"seqno":1,"snapshot":[1,1],"purge":0}',1,1,1);
COMMIT;
