// Package pool keeps volumes on a disk: the pool's configuration and identity,
// the records beside the data, the ledger of promised bytes, the trash. The
// disk is the database; all that is held in memory can be read from it again.
//
//	<pool>/pool.json                     version, UUID, name; written once
//	<pool>/volumes/<name>/volume.json    the record
//	<pool>/volumes/<name>/image          the data
//	<pool>/volumes/<name>/formatting     the node began to make a filesystem
//	<pool>/volumes/<name>/formatted      the filesystem is complete
//	<pool>/volumes/<name>/attached/node  where the volume is controller-published
//	<pool>/.trivet/tmp/                  being made: not a volume yet
//	<pool>/.trivet/trash/                being removed: not a volume any more
//	<pool>/.trivet/lock                  held by the driver that writes here
//
// What is in an image, how it is mounted and who asks for it is not known here.
package pool
