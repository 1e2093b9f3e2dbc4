package backend

import (
	"errors"
	"io"

	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// SameContext is the remedy for a request with another SELinux context than that of the mounted volume.
const SameContext = "a mounted filesystem has one context: give all pods that use the volume on this node the same seLinuxOptions, or end the other pods first"

// ExplainMount adds a sentinel error of package volume to an error of mounting: ErrInvalid for a
// mount option, ErrUnavailable if a retry may succeed, ErrPrecondition if an administrator must change
// something first.
func ExplainMount(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, mount.ErrBadOption), errors.Is(err, mount.ErrUnknownContext):
		return volume.Errorf(volume.ErrInvalid, "%w", err)
	case errors.Is(err, mount.ErrOtherContext):
		return volume.Errorf(volume.ErrPrecondition, "%w: %s", err, SameContext)
	case errors.Is(err, mount.ErrServerSilent), errors.Is(err, mount.ErrServerName):
		return volume.Errorf(volume.ErrUnavailable, "%w", err)
	}
	for _, known := range []error{
		mount.ErrExportMissing, mount.ErrExportDenied, mount.ErrKerberos, mount.ErrNoGSSD, mount.ErrKerberosRefused, mount.ErrPrivacy,
		mount.ErrNoTLS, mount.ErrNoTLSHD, mount.ErrTLSDenied, mount.ErrNFSVersion, mount.ErrNoStatd, mount.ErrNoNFS, mount.ErrMayNotMount,
		mount.ErrNoFilesystem, mount.ErrOtherDirectory, mount.ErrNoSELinux,
	} {
		if errors.Is(err, known) {
			return volume.Errorf(volume.ErrPrecondition, "%w", err)
		}
	}
	return err
}

// ExplainMountFlags returns ErrInvalid with the flags and the remedy for an error of mount flags (mount.ErrBadOption).
func ExplainMountFlags(flags []string, err error) error {
	remedy := "remove it from mountOptions"
	if errors.Is(err, mount.ErrBadContext) { // the kubelet sets a context, too
		remedy = "set seLinuxMount: false in the chart, or, with Kubernetes 1.33 and later, seLinuxChangePolicy: Recursive in the pod's securityContext; if mountOptions contain the context, remove it"
	}
	return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.mount_flags %q: %w: %s", flags, err, remedy)
}

// ExplainDetach adds the volume, and ErrInUse, to the error of detaching a loop device that is mounted
// or open. It returns any other error unchanged.
func ExplainDetach(v volume.Volume, err error) error {
	switch {
	case errors.Is(err, blockdev.ErrDeviceMounted):
		return volume.Errorf(volume.ErrInUse, "volume %s: %w: unpublish the volume there first", v.ID, err)
	case errors.Is(err, blockdev.ErrDeviceBusy):
		return volume.Errorf(volume.ErrInUse, "volume %s: %w", v.ID, err)
	}
	return err
}

// CheckUnmounted returns ErrInUse if the source of a volume is mounted on this node.
func CheckUnmounted(v volume.Volume, source mount.Source) error {
	mounts, err := mount.Of(source)
	if err != nil || len(mounts) == 0 {
		return err
	}
	return volume.Errorf(volume.ErrInUse, "volume %s is in use on this node: it is mounted at %s: unpublish and unstage it first", v.ID, mounts[0].Mountpoint)
}

// Closers closes all its elements.
type Closers []io.Closer

// Close implements io.Closer.
func (c Closers) Close() error {
	var err error
	for _, closer := range c {
		err = errors.Join(err, closer.Close())
	}
	return err
}
