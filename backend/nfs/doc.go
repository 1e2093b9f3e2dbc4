// Package nfs is the backend of volumes that are directories of an export, which many nodes can use
// at once. Their capacity is not enforced: an export has only the size of its filesystem.
//
// A volume's directory is `data` in the volume's folder, or the subDir of its class. That path
// itself is mounted, so that the mount gives no access to parent directories. Only root can enter a
// volume's folder, whatever the mode of the directory.
package nfs
