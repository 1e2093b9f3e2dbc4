// Package loop is the backend of volumes that are image files, attached as loop
// block devices: hard capacity, any filesystem or a raw device, on any directory
// that does direct I/O, or on an NFS export.
//
// The flock on the image's descriptor is the fence: the loop driver keeps that
// descriptor, so the lock lives exactly as long as the device does, and who
// holds it may write, delete or check the image. Over NFS what the device writes
// carries that lock, and the server refuses it once it has taken the lock away.
//
// Of an image in an nfs pool nothing but its device is written to, by the
// filesystem or by the programs that make and check it: whatever opens the image
// once more writes without the lock.
package loop
