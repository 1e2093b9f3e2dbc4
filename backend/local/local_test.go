package local_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/backend/local"
	"github.com/trivet-csi/trivet/volume"
)

func TestMain(m *testing.M) { backendtest.Main(m, targets.Backends...) }

// TestContext: a directory cannot be mounted with an SELinux context, and the error names the remedies.
func TestContext(t *testing.T) {
	v := volume.Volume{ID: volume.ID{Backend: local.Name, Pool: "default", Name: "pvc-1"}, Directory: &volume.Directory{}}
	flags := []string{"noatime", `context="system_u:object_r:container_file_t:s0:c1,c2"`}
	err := local.Kind.Supports(v, volume.Capability{Mode: volume.SingleNodeWriter, MountFlags: flags})
	if !errors.Is(err, volume.ErrInvalid) || !strings.Contains(err.Error(), "seLinuxMount: false") || !strings.Contains(err.Error(), "seLinuxChangePolicy: Recursive") {
		t.Errorf("got %v, want ErrInvalid with the remedies seLinuxMount: false and seLinuxChangePolicy: Recursive", err)
	}
}

func TestConformance(t *testing.T) { targets.Run(t, "directories-unlimited", "directories-btrfs") }
