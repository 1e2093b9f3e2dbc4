package plugins

import (
	"bufio"
	"fmt"
	"os"
	"strings"
)

// evictionThreshold is the default of a kubelet's evictionHard memory.available, in bytes.
const evictionThreshold = 100 << 20

// AllocatableMemory returns the memory that a kubelet without reservations allocates to pods, in
// bytes: all memory except huge pages and the eviction threshold.
func AllocatableMemory() (int64, error) {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	defer f.Close()
	kib := map[string]int64{}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), ":")
		var n int64
		if _, err := fmt.Sscan(value, &n); err == nil {
			kib[name] = n
		}
	}
	return max(0, (kib["MemTotal"]-kib["Hugetlb"])<<10-evictionThreshold), lines.Err()
}
