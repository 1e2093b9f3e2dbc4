package targets

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// realDisks returns the target of the disks on a bus of a virtual machine. The kernel scans their partition tables
// automatically, in contrast to those of loop devices.
func realDisks(bus, glob string) backendtest.Target {
	target := loopDisks()
	target.Name, target.Guest, target.Growing, target.Plug = "disks-"+bus, true, nil, nil
	target.Medium = backendtest.OnDisks(func(testing.TB, backendtest.Room) []string { return []string{glob} })
	switch bus {
	case "nvme":
		target.Growing = growingNVMe
	case "scsi":
		target.Pull = testenv.PullSCSI
	}
	return target
}

// growingNVMe creates a disk from a file that this machine exports to itself by NVMe over TCP (kernel
// documentation, ABI/testing/configfs-nvmet). When the file is enlarged, the kernel gets a notification of the
// new size, as with other network disks.
func growingNVMe(tb testing.TB, size int64) (device string, enlarge func(size int64)) {
	tb.Helper()
	const (
		nqn       = "growing"
		uuid      = "6e7f1a52-61f1-4c4e-9a4c-1a51de3c8a4f"
		config    = "/sys/kernel/config"
		subsystem = config + "/nvmet/subsystems/" + nqn
		namespace = subsystem + "/namespaces/1"
		port      = config + "/nvmet/ports/1"
	)
	must := func(err error) {
		tb.Helper()
		if err != nil {
			tb.Fatal(err)
		}
	}
	set := func(path, value string) {
		tb.Helper()
		must(os.WriteFile(path, []byte(value), 0))
	}
	for _, module := range []string{"nvmet-tcp", "nvme-tcp"} {
		testenv.Run(tb, "modprobe", module)
	}
	testenv.Run(tb, "sh", "-c", "mountpoint -q "+config+" || mount -t configfs none "+config)
	image := filepath.Join(tb.TempDir(), "disk")
	must(os.WriteFile(image, nil, 0o600))
	must(os.Truncate(image, size))
	for _, dir := range []string{subsystem, namespace, port} {
		must(os.Mkdir(dir, 0o755))
		tb.Cleanup(func() { must(os.Remove(dir)) })
	}
	set(subsystem+"/attr_allow_any_host", "1")
	set(namespace+"/device_path", image)
	set(namespace+"/device_uuid", uuid)
	set(namespace+"/enable", "1")
	for file, value := range map[string]string{"trtype": "tcp", "adrfam": "ipv4", "traddr": "127.0.0.1", "trsvcid": "4420"} {
		set(port+"/addr_"+file, value)
	}
	must(os.Symlink(subsystem, port+"/subsystems/"+nqn))
	tb.Cleanup(func() { must(os.Remove(port + "/subsystems/" + nqn)) })
	set("/dev/nvme-fabrics", "transport=tcp,traddr=127.0.0.1,trsvcid=4420,nqn="+nqn)
	tb.Cleanup(func() {
		set(awaitFile(tb, "/sys/class/nvme/*/subsysnqn", nqn)+"/delete_controller", "1")
	})
	disk := awaitFile(tb, "/sys/block/nvme?n1/wwid", "uuid."+uuid)
	return "/dev/" + filepath.Base(disk), func(size int64) {
		must(os.Truncate(image, size))
		set(namespace+"/revalidate_size", "1")
		awaitFile(tb, disk+"/size", strconv.FormatInt(size/512, 10)) // sysfs counts in units of 512 bytes
	}
}

// awaitFile waits until a file that matches glob contains exactly a text, and returns the file's directory.
func awaitFile(tb testing.TB, glob, text string) string {
	tb.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		files, err := filepath.Glob(glob)
		if err != nil {
			tb.Fatal(err)
		}
		for _, file := range files {
			if b, err := os.ReadFile(file); err == nil && strings.TrimSpace(string(b)) == text {
				return filepath.Dir(file)
			}
		}
	}
	tb.Fatalf("timed out waiting for a file %s with the content %s", glob, text)
	return ""
}
