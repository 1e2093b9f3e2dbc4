// Package pool keeps volumes on a disk: the pool's configuration and identity,
// the records beside the data, the ledger of promised bytes, the trash. The
// disk is the database; all that is held in memory can be read from it again.
//
//	<pool>/pool.json                     version, UUID, name; written once
//	<pool>/volumes/<name>/volume.json    the record
//	<pool>/volumes/<name>/image          the data
//	<pool>/volumes/<name>/formatting     the node began to make a filesystem
//	<pool>/volumes/<name>/formatted      the filesystem is complete
//	<pool>/volumes/<name>/data/          the same of a volume that is a directory
//	<pool>/volumes/<name>/attached/node  where the volume is controller-published
//	<pool>/volumes/<name>/cloned         the filesystem is a copy, with another's identity
//	<pool>/snapshots/<name>/snapshot.json   the record of a snapshot
//	<pool>/snapshots/<name>/0/image         its data; or data/, of a directory
//	<pool>/snapshots/<name>.group/          a group, with 0/, 1/, …
//	<pool>/.trivet/tmp/                  volumes and snapshots that are not complete yet
//	<pool>/.trivet/trash/                deleted volumes and snapshots that are being removed
//	<pool>/.trivet/lock                  held by the driver that writes here
//
// A Pool has parts with their own state: Attachments, Snapshots, Images, Quotas, Trash and
// Jobs. A Medium hides whether one process writes the pool or several do (pool/shared). Package
// ledger counts the promised bytes; package beneath opens files without following links.
//
// A shared pool is written by several processes, of several nodes. It has no one lock:
//
//	<pool>/volumes/<name>/attached/node.<hash>  one per node, where several may have it
//	<pool>/volumes/<name>/lock                  held by a call that grows, stages or copies the volume
//	<pool>/archived/<name>.<time>.<random>/     of deleted volumes, with onDelete: archive
//	<pool>/retained/<name>.<time>.<random>/     the same, with onDelete: retain
//	<pool>/.trivet/owners/<random>              held by a process that makes something in tmp
//	<pool>/.trivet/ledger                       held by a process that reserves bytes
//	<pool>/.trivet/reaper                       held by the process that empties the trash
//
// This package does not know the content of an image, how it is mounted, or which service
// asks for it.
package pool
