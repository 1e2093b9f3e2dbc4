// Package loop is the backend of volumes that are image files, attached as loop
// block devices: hard capacity, any filesystem or a raw device, on any directory
// that does direct I/O.
//
// The flock on the image's descriptor is the fence: the loop driver keeps that
// descriptor, so the lock lives exactly as long as the device does, and who
// holds it may write, delete or check the image.
package loop
