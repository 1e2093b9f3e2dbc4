//go:build vm

package mount_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
)

// TestCanonicalContext: the kernel sorts categories and resolves aliases of types.
func TestCanonicalContext(t *testing.T) {
	for context, want := range map[string]string{
		"system_u:object_r:container_file_t:s0:c1,c2":       "system_u:object_r:container_file_t:s0:c1,c2",
		"system_u:object_r:container_file_t:s0:c2,c1":       "system_u:object_r:container_file_t:s0:c1,c2",
		"system_u:object_r:container_file_t:s0:c0,c1,c2":    "system_u:object_r:container_file_t:s0:c0.c2",
		"system_u:object_r:svirt_sandbox_file_t:s0:c27,c14": "system_u:object_r:container_file_t:s0:c14,c27",
		"system_u:object_r:container_file_t:s0":             "system_u:object_r:container_file_t:s0",
	} {
		if got, err := mount.CanonicalContext(context); err != nil || got != want {
			t.Errorf("%s: got %q, %v, want %q", context, got, err, want)
		}
	}
	for _, context := range []string{"system_u:object_r:no_such_type_t:s0", "container_file_t", ""} {
		if got, err := mount.CanonicalContext(context); !errors.Is(err, mount.ErrUnknownContext) {
			t.Errorf("%q: got %q, %v, want %v", context, got, err, mount.ErrUnknownContext)
		}
	}
}

// TestProbeContext: only contexts of the policy can be used.
func TestProbeContext(t *testing.T) {
	must(t, mount.ProbeContext("system_u:object_r:container_file_t:s0"))
	if err := mount.ProbeContext("system_u:object_r:no_such_type_t:s0"); !errors.Is(err, mount.ErrUnknownContext) {
		t.Errorf("got %v, want %v", err, mount.ErrUnknownContext)
	}
}

// TestOtherContext: a filesystem that is mounted with a context cannot be mounted again with another one, or without one, also if
// its mount is not in the mount table of this process.
func TestOtherContext(t *testing.T) {
	const (
		one   = "system_u:object_r:container_file_t:s0:c1,c2"
		other = "system_u:object_r:container_file_t:s0:c3,c4"
	)
	for _, fsType := range []string{"ext4", "xfs"} {
		t.Run(fsType, func(t *testing.T) {
			device, _, _ := testenv.Disk(t, 320<<20)
			testenv.Mkfs(t, fsType, device)
			first, err := mount.Filesystem(device, fsType, mount.Options{Context: one})
			must(t, err)
			refused := func(says ...string) {
				t.Helper()
				for context, name := range map[string]string{other: other, "": "(none)"} {
					_, err := mount.Filesystem(device, fsType, mount.Options{Context: context})
					if !errors.Is(err, mount.ErrOtherContext) {
						t.Fatalf("mounting with the context %s: got %v, want %v", name, err, mount.ErrOtherContext)
					}
					for _, want := range append(says, name) {
						if !strings.Contains(err.Error(), want) {
							t.Errorf("mounting with the context %s: got %v, want %q in it", name, err, want)
						}
					}
				}
			}
			refused("another mount namespace")
			target := t.TempDir()
			must(t, first.MoveTo(target))
			t.Cleanup(func() { must(t, mount.Unmount(target)) })
			must(t, first.Close())
			refused(target, one)
			second, err := mount.Filesystem(device, fsType, mount.Options{Context: "system_u:object_r:svirt_sandbox_file_t:s0:c2,c1"})
			must(t, err)
			must(t, second.Close())
		})
	}
}
