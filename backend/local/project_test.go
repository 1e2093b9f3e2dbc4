//go:build vm

package local_test

import (
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/local"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// TestProjectConformance is TestConformance where project quotas limit directories.
func TestProjectConformance(t *testing.T) {
	for fsType, limits := range map[string]*backendtest.Limits{
		"xfs":  {},
		"ext4": {RootExempt: true},
	} {
		limits.Remounts = true
		limits.Off = func(tb testing.TB, path string) { testenv.SwitchProjects(tb, path, false) }
		limits.On = func(tb testing.TB, path string) { testenv.SwitchProjects(tb, path, true) }
		t.Run(fsType, func(t *testing.T) {
			backendtest.Run(t, backendtest.Target{
				New: local.New, Kinds: []backendtest.Kind{{FSType: "dir"}}, Limits: limits,
				Filesystem: func(tb testing.TB, size string) string { return testenv.ProjectQuotas(tb, fsType, size) },
			})
		})
	}
}
