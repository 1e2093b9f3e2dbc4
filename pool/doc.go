// Package pool stores volumes on a disk: the pool's configuration and identity, the records
// beside the data, the ledger of promised bytes, and the trash. The disk is the database: all
// state in memory can be read from it again.
//
//	<pool>/pool.json                     version, UUID, name; written once
//	<pool>/volumes/<name>/volume.json    the record
//	<pool>/volumes/<name>/image          the data
//	<pool>/volumes/<name>/formatting     a filesystem is being made
//	<pool>/volumes/<name>/formatted      the filesystem is complete
//	<pool>/volumes/<name>/data/          the data of a volume that is a directory
//	<pool>/volumes/<name>/attached/node  where the volume is controller-published
//	<pool>/volumes/<name>/cloned         the filesystem is a copy, with the UUID of another one
//	<pool>/snapshots/<name>/snapshot.json   the record of a snapshot
//	<pool>/snapshots/<name>/0/image         its data; or data/, of a directory
//	<pool>/snapshots/<name>.group/          a group, with 0/, 1/, …
//	<pool>/.trivet/tmp/                  incomplete volumes and snapshots
//	<pool>/.trivet/trash/                deleted volumes and snapshots that are being removed
//	<pool>/.trivet/lock                  held by the driver that writes here
//
// A Pool has parts with their own state: Attachments, Snapshots, Images, Quotas, Trash and
// Jobs. A Medium hides whether one process writes the pool or several do (pool/shared). Package
// ledger counts the promised bytes; package beneath opens files without following links.
//
// Several processes on several nodes write a shared pool. It has several locks:
//
//	<pool>/volumes/<name>/attached/node.<hash>  one per node, for access modes with several nodes
//	<pool>/volumes/<name>/lock                  held by a call that grows, stages or copies the volume
//	<pool>/archived/<name>.<time>.<random>/     of deleted volumes, with onDelete: archive
//	<pool>/retained/<name>.<time>.<random>/     the same, with onDelete: retain
//	<pool>/.trivet/owners/<random>              held by a process that makes entries in tmp
//	<pool>/.trivet/ledger                       held by a process that reserves bytes
//	<pool>/.trivet/reaper                       held by the process that empties the trash
//
// This package does not know the content of an image, how it is mounted, or which service uses
// it.
package pool
