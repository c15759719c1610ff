// Answers left as the next product takes them: in the order of its stored inputs, so that nobody need prepare them for it.
// A root mean square before it is taken as well, but for its factor, which is the next product's to find: from the sums of
// squares that every thread block leaves for its own outputs.

#define NOWHERE 65535

struct Heir {
    const uint4* places;  // of each output: stored inputs that it is, NOWHERE behind the last of up to eight
    const u16* gaps;      // stored inputs that are nobody's, to be zero
    const float* norm;    // what each output is multiplied by; null: nothing
    u16* words;           // of few rows (thirty-two inputs, row, 32), else (eight inputs, eight rows, input, row); or null
    float* squares;       // (row, share); null: nobody asks for them
    int empty, room, shares, few;  // gaps, rows there is room for, thread blocks that leave squares
};

DEVICE u16* spot(const Heir& heir, u32 place, int row) {
    if (heir.few) return heir.words + (place / 32 * heir.room + row) * 32 + place % 32;
    const u32 matrix = place / 32 * 4 + place % 8 / 2, input = place % 32 / 8 * 2 + place % 2;  // for the tensor cores
    return heir.words + ((matrix * (heir.room / 8) + row / 8) * 8 + input) * 8 + row % 8;
}

// A number of a row to all places of its output.
DEVICE void hand(const Heir& heir, uint4 places, int row, u16 number) {
    const u32 pairs[4] = {places.x, places.y, places.z, places.w};
    LOOP for (int i = 0; i < 8; i++) {
        const u32 place = pairs[i / 2] >> i % 2 * 16 & 65535;
        if (place == NOWHERE) return;
        *spot(heir, place, row) = number;
    }
}

// The same of eight rows, where they lie together.
DEVICE void hand_eight(const Heir& heir, uint4 places, int row, const u16 (&halves)[8]) {
    const u32 pairs[4] = {places.x, places.y, places.z, places.w};
    u32 words[4];
    LOOP for (int w = 0; w < 4; w++) words[w] = halves[2 * w] | (u32)halves[2 * w + 1] << 16;
    LOOP for (int i = 0; i < 8; i++) {
        const u32 place = pairs[i / 2] >> i % 2 * 16 & 65535;
        if (place == NOWHERE) return;
        *(uint4*)spot(heir, place, row) = uint4{words[0], words[1], words[2], words[3]};
    }
}

// Gaps of rows, shared out to threads; a thread's first is looked up before it may be written.
struct Gap {
    int at;
    u32 place;

    DEVICE void find(const Heir& heir, int thread) {
        at = thread;
        place = heir.words && at < heir.empty * heir.room ? heir.gaps[at / heir.room] : NOWHERE;
    }
    DEVICE void close(const Heir& heir, int threads) {
        while (place != NOWHERE) {
            *spot(heir, place, at % heir.room) = 0;
            find(heir, at + threads);
        }
    }
};
