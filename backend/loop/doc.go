// Package loop is the backend of volumes that are image files, attached as loop
// block devices: hard capacity, any filesystem or a raw device, on any directory
// that does direct I/O, or on an NFS export.
//
// The flock on the image fences it: the loop driver keeps the locked descriptor open, so the
// lock exists exactly as long as the device. Only the holder of the lock writes, deletes or
// checks the image. Over NFS the writes of the device carry the lock, and the server refuses
// them after it has revoked the lock.
//
// The image of a volume in an nfs pool is written only through its device, also by mkfs and
// fsck: a second open file of the image would write without the lock.
package loop
