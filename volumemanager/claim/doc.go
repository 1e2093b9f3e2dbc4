// Package claim gives claims their volumes: what a controller manager, an
// external-provisioner and an external-resizer do for a cluster, for one machine. It
// binds, provisions, expands and reclaims.
//
// What is decided is written in the store before it is done or told, each time in an
// order from which a restart goes on: a claim is recorded as Pending before its volume is
// made, the volume before the claim is Bound; a volume is Released before its claim is
// forgotten, and forgotten once it is deleted. So a Sync decides from manifests and store
// alone, and each operation looks once more before it writes.
//
// A claim is told from others of its name by its UID, which follows from the name unless
// its manifest has one: so one that comes back has its volume again, as far as that was
// retained, or had not begun to be deleted. A volume that was retained becomes another
// claim's when a manifest of it has that claim in spec.claimRef. One that came from a
// manifest becomes anybody's when that is removed, and added again later.
package claim
