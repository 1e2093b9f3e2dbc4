package backend_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// TestExplainMountFlags: the remedy for an SELinux context differs from that for other flags, because the kubelet can have set it.
func TestExplainMountFlags(t *testing.T) {
	for flags, remedy := range map[string]string{
		"noatime,bind": ": remove it from mountOptions",
		"context=u:object_r:t:s0,context=u:object_r:t:s1": ": set seLinuxMount: false",
	} {
		words := []string{flags}
		_, err := mount.ParseFlags(words)
		err = backend.ExplainMountFlags(words, err)
		if !errors.Is(err, volume.ErrInvalid) || !errors.Is(err, mount.ErrBadOption) || !strings.Contains(err.Error(), flags) || !strings.Contains(err.Error(), remedy) {
			t.Errorf("%s: got %v, want ErrInvalid with the flags and the remedy %q", flags, err, remedy)
		}
	}
}

// TestExplainOtherContext: a volume that is mounted with another SELinux context is not damaged.
func TestExplainOtherContext(t *testing.T) {
	err := backend.ExplainMount(&mount.Error{Op: "mount", Err: mount.ErrOtherContext})
	if !errors.Is(err, volume.ErrPrecondition) || !strings.Contains(err.Error(), "seLinuxOptions") {
		t.Errorf("got %v, want ErrPrecondition with the remedy", err)
	}
}
