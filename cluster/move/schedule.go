package move

import (
	"fmt"
	"hash/fnv"
	"strings"
	"time"
)

// schedule returns the schedule of a CronJob that runs after each period. The minute and the hour of the first run depend on the UID
// of the claim, so that not all protections of a cluster run at the same time.
func schedule(every time.Duration, uid string) (string, error) {
	minutes, hours := every/time.Minute, every/time.Hour
	h := fnv.New32a()
	_, _ = h.Write([]byte(uid))
	offset := time.Duration(h.Sum32())
	switch {
	case every < time.Minute, every%time.Minute != 0:
	case hours == 24 && every%time.Hour == 0:
		return fmt.Sprintf("%d %d * * *", offset%60, offset/60%24), nil
	case every >= time.Hour && every%time.Hour == 0 && hours < 24 && 24%hours == 0:
		return fmt.Sprintf("%d %d-23/%d * * *", offset%60, offset/60%hours, hours), nil
	case every < time.Hour && 60%minutes == 0:
		return fmt.Sprintf("%d-59/%d * * * *", offset%minutes, minutes), nil
	}
	return "", fmt.Errorf("--every %v: a CronJob cannot run with this period: use 1m, 2m, 3m, 4m, 5m, 6m, 10m, 12m, 15m, 20m, 30m, 1h, 2h, 3h, 4h, 6h, 8h, 12h or 24h", every)
}

// Period returns a period as a user writes it, such as 1h.
func Period(every time.Duration) string {
	return strings.Replace(strings.Replace(every.String(), "m0s", "m", 1), "h0m", "h", 1)
}
