package doctor

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/command"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/cgroup"
	"github.com/trivet-csi/trivet/linux/mount"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// expect fails the test unless a check has a result and contains a text. Only a warning and a failure must have a
// remedy.
func expect(t *testing.T, name string, got Check, result Result, says string) {
	t.Helper()
	needsRemedy := got.Result == Warning || got.Result == Failure
	if got.Result != result || !strings.Contains(got.Seen, says) || needsRemedy != (got.Remedy != "") || got.Name == "" {
		t.Errorf("%s: got %+v, want result %s with %q, remedy: %t", name, got, result, says, needsRemedy)
	}
}

// TestJudgeNode judges the possible facts about a node.
func TestJudgeNode(t *testing.T) {
	const loaded = "nodev\tsysfs\nnodev\ttmpfs\n\text4\n"
	ext4 := blockdev.Program{Name: "mkfs.ext4", Package: "e2fsprogs", Least: "1.47"}
	for name, tc := range map[string]struct {
		check  Check
		result Result
		says   string
	}{
		"kernel":             {judgeKernel("6.18.44-fc-v657"), OK, "6.18"},
		"kernel just enough": {judgeKernel("5.12.0"), OK, "5.12"},
		"kernel too old":     {judgeKernel("5.10.0-28-amd64"), Failure, "5.10.0"},
		"kernel unknown":     {judgeKernel(""), Failure, "Linux"},

		"all capabilities": {judgeCapabilities("Name:\tx\nCapEff:\t000001ffffffffff\nCapBnd:\t0\n"), OK, "CAP_SYS_RESOURCE"},
		"no sys_resource":  {judgeCapabilities("CapEff:\t000001fffeffffff\n"), Warning, "CAP_SYS_RESOURCE is missing"},
		"no sys_admin":     {judgeCapabilities("CapEff:\t00000000a80425fb\n"), Failure, "CAP_SYS_ADMIN is missing"},
		"no CapEff":        {judgeCapabilities(""), Warning, "does not contain CapEff"},

		"mounting":        {judgeMounting(nil), OK, "open_tree"},
		"mounting denied": {judgeMounting(errors.New("open_tree /: operation not permitted")), Failure, "not permitted"},

		"one filesystem":  {judgeFilesystems(loaded), OK, "ext4; not loaded"},
		"all filesystems": {judgeFilesystems(loaded + "\txfs\n\tbtrfs\n"), OK, "ext4, xfs, btrfs"},
		"no filesystem":   {judgeFilesystems("nodev\text4fs\n"), Warning, "none of"},

		"no SELinux":      {judgeSELinux(fmt.Errorf("mount: %w", mount.ErrNoSELinux)), OK, "not enabled"},
		"SELinux":         {judgeSELinux(nil), OK, "enabled"},
		"unknown context": {judgeSELinux(mount.ErrUnknownContext), Warning, "does not contain the context"},

		"I/O limits":    {judgeIOLimits(nil), OK, "can limit"},
		"no I/O limits": {judgeIOLimits(cgroup.ErrUnsupported), OK, "only volumes with limits"},

		"finding":             {judgeFinding(backend.Finding{Name: "n", Found: "good"}), OK, "good"},
		"finding with advice": {judgeFinding(backend.Finding{Name: "n", Found: "poor", Advice: "fix it"}), Warning, "poor"},
		"unusable":            {judgeFinding(backend.Finding{Name: "n", Found: "bad", Advice: "fix it", Unusable: true}), Failure, "bad"},

		"program":                {judgeProgram(ext4, "1.47.0", nil), OK, "1.47.0"},
		"program of any version": {judgeProgram(blockdev.Program{Name: "mkfs.btrfs"}, "4.1", nil), OK, "4.1"},
		"program too old":        {judgeProgram(ext4, "1.46.5", nil), Failure, "1.46.5"},
		"no program":             {judgeProgram(ext4, "", fmt.Errorf("mkfs.ext4: %w", command.ErrMissing)), Failure, "not found"},
		"program that fails":     {judgeProgram(ext4, "", errors.New("killed")), Failure, "killed"},
	} {
		expect(t, name, tc.check, tc.result, tc.says)
	}
}

// TestNode: the checks of this machine succeed, because it meets the requirements of the tests.
func TestNode(t *testing.T) {
	testenv.RequireRoot(t)
	checks := nodeChecks(t.Context(), allKinds)
	if Failed(checks) || !slices.ContainsFunc(checks, func(c Check) bool { return c.Name == "loop control" }) {
		t.Errorf("got %+v, want no failure, and a check loop control", checks)
	}
}
