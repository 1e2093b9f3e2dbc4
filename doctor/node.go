package doctor

import (
	"context"
	"errors"
	"os"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/version"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/command"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/cgroup"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// leastKernel is the first Linux version with mount_setattr(2).
const leastKernel = "5.12"

// nodeChecks checks the kernel, the requirements of the kinds of volumes, and the installed programs.
func nodeChecks(ctx context.Context, kinds backend.Kinds) []Check {
	checks := []Check{
		judgeKernel(read("/proc/sys/kernel/osrelease")),
		judgeCapabilities(read("/proc/self/status")),
		judgeMounting(mount.Probe()),
		judgeFilesystems(read("/proc/filesystems")),
		judgeSELinux(mount.ProbeContext(podContext)),
	}
	if slices.ContainsFunc(kinds, func(k backend.Kind) bool { return !k.Directories }) {
		checks = append(checks, judgeIOLimits(cgroup.Hierarchy(cgroup.Root).Check()))
	}
	for _, k := range kinds {
		if k.Examine == nil {
			continue
		}
		for _, f := range k.Examine() {
			checks = append(checks, judgeFinding(f))
		}
	}
	for _, p := range blockdev.Programs {
		have, err := p.Version(ctx)
		checks = append(checks, judgeProgram(p, have, err))
	}
	return checks
}

// read returns the content of a file in /proc or /sys, or an empty string if the file does not exist. No
// check succeeds with an empty string.
func read(path string) string {
	b, _ := os.ReadFile(path)
	return strings.TrimSpace(string(b))
}

func judgeKernel(release string) Check {
	const name = "kernel"
	if !atLeast(release, leastKernel) {
		return failure(name, "Linux "+release, "the driver needs Linux "+leastKernel+": run a newer kernel")
	}
	return ok(name, "Linux %s", release)
}

// atLeast reports whether a version is at least another. It returns false for an invalid version.
func atLeast(have, least string) bool {
	v, err := version.ParseGeneric(have)
	return err == nil && v.AtLeast(version.MustParseGeneric(least))
}

// Bits of a capability set (linux/capability.h).
const (
	capSysAdmin    = 1 << 21
	capSysResource = 1 << 24
)

// judgeCapabilities judges the content of /proc/self/status.
func judgeCapabilities(status string) Check {
	const name = "capabilities"
	_, rest, _ := strings.Cut(status, "CapEff:")
	field, _, _ := strings.Cut(strings.TrimSpace(rest), "\n")
	effective, err := strconv.ParseUint(field, 16, 64)
	switch {
	case err != nil:
		return warning(name, "/proc/self/status does not contain CapEff", "run the doctor where /proc is mounted")
	case effective&capSysAdmin == 0:
		return failure(name, "CAP_SYS_ADMIN is missing, so nothing can be mounted or attached", "run the driver as root, in Kubernetes as a privileged container")
	case effective&capSysResource == 0:
		return warning(name, "CAP_SYS_RESOURCE is missing, so ext4 cannot grow while it is in use", "give the driver CAP_SYS_RESOURCE (a privileged container has what its host has), or use xfs for volumes that grow")
	}
	return ok(name, "CAP_SYS_ADMIN, CAP_SYS_RESOURCE")
}

func judgeMounting(err error) Check {
	const name = "mounting"
	const fix = "if a function is not implemented, run Linux " + leastKernel + " or newer; if an operation is not permitted, run as root and privileged, without a seccomp profile that forbids mounts"
	return judgeError(name, err, nil, fix, "open_tree, mount_setattr and fsopen work")
}

// judgeFilesystems judges the content of /proc/filesystems: the built-in and the loaded filesystems.
func judgeFilesystems(table string) Check {
	const name = "filesystems"
	words := strings.Fields(table)
	var have, missing []string
	for _, fs := range volume.FSTypes {
		if slices.Contains(words, fs) {
			have = append(have, fs)
		} else {
			missing = append(missing, fs)
		}
	}
	switch {
	case len(have) == 0:
		return warning(name, "none of "+strings.Join(missing, ", ")+" is loaded", "load the filesystems of the volumes, for example: modprobe "+missing[0])
	case len(missing) > 0:
		return ok(name, "%s; not loaded, but the kernel loads existing modules at the first mount: %s", strings.Join(have, ", "), strings.Join(missing, ", "))
	}
	return ok(name, "%s", strings.Join(have, ", "))
}

// podContext is the SELinux context of files of a pod without categories.
const podContext = "system_u:object_r:container_file_t:s0"

// judgeSELinux judges the result of mount.ProbeContext for podContext.
func judgeSELinux(err error) Check {
	const name = "SELinux"
	switch {
	case errors.Is(err, mount.ErrNoSELinux):
		return ok(name, "not enabled")
	case err != nil:
		return warning(name, "enabled, but no filesystem can be mounted with a context of pods: "+err.Error(),
			"install the policy for containers (container-selinux), and run the driver as a privileged container; or set seLinuxMount: false of the chart, which is the default")
	}
	return ok(name, "enabled, and volumes can be mounted with the context of a pod")
}

// judgeIOLimits judges the result of cgroup.Hierarchy.Check. Without limits nothing is wrong.
func judgeIOLimits(err error) Check {
	const name = "I/O limits"
	if err != nil {
		return ok(name, "only volumes with limits need them, and they cannot be used: %v", err)
	}
	return ok(name, "cgroup v2 can limit the I/O of pods")
}

// judgeFinding converts a finding of a kind of volume to a check.
func judgeFinding(f backend.Finding) Check {
	if f.Unusable {
		return failure(f.Name, f.Found, f.Advice)
	}
	return advised(f.Name, f.Found, f.Advice)
}

func judgeProgram(p blockdev.Program, have string, err error) Check {
	name := "program " + p.Name
	install := "install " + p.Package
	if p.Least != "" {
		install += " " + p.Least + " or newer"
	}
	install += ", or run the driver from its image"
	switch {
	case errors.Is(err, command.ErrMissing):
		return failure(name, "not found in PATH", install)
	case err != nil:
		return failure(name, err.Error(), install)
	case p.Least != "" && !atLeast(have, p.Least):
		return failure(name, "version "+have, install)
	}
	return ok(name, "version %s", have)
}
