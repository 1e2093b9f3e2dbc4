//go:build vm

package mount_test

import (
	"errors"
	"testing"

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
