// Package pool stores volumes on a disk: the pool's configuration and identity, the records
// beside the data, the ledger of promised bytes, and the trash. There is no database: all state in
// memory can be read from the disk again.
//
//	<pool>/pool.json                     version, UUID, name; written once
//	<pool>/volumes/<name>/volume.json    the record
//	<pool>/volumes/<name>/image          the data
//	<pool>/volumes/<name>/formatting     a filesystem is being made
//	<pool>/volumes/<name>/formatted      the filesystem is complete
//	<pool>/volumes/<name>/data/          the data of a volume that is a directory
//	<pool>/volumes/<name>/attached/node  where the volume is controller-published
//	<pool>/volumes/<name>/cloned         the filesystem is a copy, and still has the UUID of the original
//	<pool>/volumes/<name>/received       the image still has the content that was received from another node
//	<pool>/archived/<name>.<time>.<random>/  a volume that was deleted with onDelete: archive
//	<pool>/retained/<name>.<time>.<random>/  a volume that was deleted with onDelete: retain
//	<pool>/snapshots/<name>/snapshot.json   the record of a snapshot
//	<pool>/snapshots/<name>/0/image         the data of a snapshot; 0/data/ for a directory volume
//	<pool>/snapshots/<name>.group/          a group of snapshots, with 0/, 1/, …
//	<pool>/.trivet/tmp/                  incomplete volumes and snapshots
//	<pool>/.trivet/received/             volumes that are being received from other nodes
//	<pool>/.trivet/trash/                deleted volumes and snapshots that are being removed
//	<pool>/.trivet/lock                  locked by the driver that writes a node-local pool
//
// These terms have a fixed meaning:
//
//   - An entry is a folder in tmp or in the trash. It is, was or becomes a volume or a set.
//   - A set is a snapshot, or a group of snapshots that were taken at one moment.
//   - An attachment records that a volume is controller-published to a node.
//   - A direct pool is a pool on an export that a StorageClass names and no configuration contains.
//   - Storage is the place of a volume's data if that is not the pool's directory (a whole disk).
//   - Promised bytes are the sum of the capacities; foreign use is the space that no volume of any pool uses.
//
// A Pool has parts with their own state: Attachments, Snapshots, Images, Quotas, Trash and
// Jobs. A Medium hides whether one process writes the pool or several do (pool/shared). Package
// ledger counts the promised bytes; package beneath opens files without following links.
//
// Processes on several nodes write a shared pool. A volume that may be controller-published to several
// nodes has one file for each of them. The other files below are locked by processes:
//
//	<pool>/volumes/<name>/attached/node.<hash>  one of the nodes where the volume is controller-published
//	<pool>/volumes/<name>/lock                  locked by a call that grows, stages or copies the volume
//	<pool>/.trivet/owners/<random>              locked by a process that makes entries in tmp
//	<pool>/.trivet/ledger                       locked by a process that reserves bytes
//	<pool>/.trivet/reaper                       locked by the process that empties the trash
//
// This package does not know the content of an image, how it is mounted, or which service uses
// it.
package pool
