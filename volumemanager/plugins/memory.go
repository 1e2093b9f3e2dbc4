package plugins

import (
	"bufio"
	"fmt"
	"os"
	"strings"
)

// evicted is the memory that a kubelet keeps free by default (evictionHard,
// memory.available).
const evicted = 100 << 20

// AllocatableMemory is what a kubelet without reservations gives to pods of this machine's
// memory, in bytes: all but huge pages and what it keeps free.
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
	return max(0, (kib["MemTotal"]-kib["Hugetlb"])<<10-evicted), lines.Err()
}
